// One call of an ATen operator on DTensors, as the sharding rules see it, and what a rule answers.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

#include "longhaul/dtensor/placement.h"

namespace longhaul::dtensor {

// An operator's arguments, with DTensors of global sizes.
class OpCall {
 public:
  OpCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args);

  const c10::OperatorHandle& op() const { return *op_; }
  const std::string& name() const;  // "aten::add"
  std::string full_name() const;    // "aten::add.Tensor"
  c10::ArrayRef<c10::IValue> args() const { return args_; }

  // The defined tensors among the arguments, those of lists one after the other.
  size_t num_inputs() const { return inputs_.size(); }
  const Tensor& input(size_t i) const { return inputs_[i]; }
  const std::vector<Tensor>& inputs() const { return inputs_; }
  // Which of them argument `arg` is; -1 if it is undefined or no tensor.
  int input_of(size_t arg) const { return input_of_[arg]; }

  int64_t int_arg(size_t arg) const { return args_[arg].toInt(); }
  // A dim, counted from the front; of input 0.
  int64_t dim_arg(size_t arg) const;
  // Dims of input 0; all of them where the argument is none or empty.
  std::vector<int64_t> dims_arg(size_t arg) const;
  bool bool_arg(size_t arg) const { return args_[arg].toBool(); }

  // Sizes of the results' wholes; set before a rule is asked.
  std::vector<std::vector<int64_t>> output_sizes;

 private:
  const c10::OperatorHandle* op_;
  c10::ArrayRef<c10::IValue> args_;
  std::vector<Tensor> inputs_;
  std::vector<int> input_of_;
};

// One way to compute an operator on parts along one mesh axis: what each input must lie in, and
// what each result then lies in.
struct Strategy {
  c10::SmallVector<Placement, 6> inputs;
  c10::SmallVector<Placement, 3> outputs;
};

// All ways, the preferred ones first: of equal cost, the first is taken. `ranks` are those of the
// mesh: the number of pieces that its axes together may cut a dim into.
using Rule = std::vector<Strategy> (*)(const OpCall& call, int64_t ranks);

// Does the whole operator itself, where placements do not say it all. Arguments are on the stack
// and results go there.
using Handler = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// What the whole of a result looks like: as the operator's Meta kernel says or, for operators that
// have none, as the sum of the inputs, as the first input, or as a number.
enum class Layout { kByMeta, kAsSum, kAsFirst, kNumber };

struct RuleEntry {
  Rule rule = nullptr;
  Handler handler = nullptr;
  int size_arg = -1;  // an argument that holds the sizes of result 0: made local
  Layout layout = Layout::kByMeta;
  const char* file = "";  // where the rule stands
  // Why a cut input must sometimes be put together, which is then said once for each decision.
  // Null: where the rule knows no other way it is an error.
  const char* whole = nullptr;
};

// The rule for an operator; null if there is none.
const RuleEntry* find_rule(const std::string& full_name);
// The file in which a rule for it would stand: that of its family.
const char* rule_file_of(const c10::OperatorHandle& op);

// Strategies that many rules share: `call.num_inputs()` inputs and all results in one placement.
Strategy uniform(const OpCall& call, Placement placement);
// Everything replicated: every rank computes the same. Each rule lists it.
inline Strategy replicated(const OpCall& call) { return uniform(call, Placement::replicate()); }

}  // namespace longhaul::dtensor
