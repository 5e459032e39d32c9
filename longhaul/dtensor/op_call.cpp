#include "longhaul/dtensor/op_call.h"

#include <ATen/ATen.h>

#include <numeric>

namespace longhaul::dtensor {

OpCall::OpCall(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args)
    : op_(&op), args_(args) {
  for (const auto& arg : args) {
    input_of_.push_back(-1);
    if (arg.isTensor()) {
      if (!arg.toTensor().defined()) continue;
      input_of_.back() = static_cast<int>(inputs_.size());
      inputs_.push_back(arg.toTensor());
    } else if (arg.isList()) {
      for (const auto& element : arg.toListRef()) {
        if (!element.isTensor() || !element.toTensor().defined()) continue;
        if (input_of_.back() < 0) input_of_.back() = static_cast<int>(inputs_.size());
        inputs_.push_back(element.toTensor());
      }
    }
  }
}

const std::string& OpCall::name() const { return op_->schema().name(); }

std::string OpCall::full_name() const {
  const auto& overload = op_->schema().overload_name();
  return overload.empty() ? name() : name() + "." + overload;
}

int64_t OpCall::dim_arg(size_t arg) const {
  return c10::maybe_wrap_dim(int_arg(arg), input(0).dim());
}

std::vector<int64_t> OpCall::dims_arg(size_t arg) const {
  const auto& value = args_[arg];
  if (value.isInt()) return {dim_arg(arg)};
  std::vector<int64_t> dims;
  if (!value.isNone()) {
    for (const int64_t dim : value.toIntVector()) {
      dims.push_back(c10::maybe_wrap_dim(dim, input(0).dim()));
    }
  }
  if (dims.empty()) {
    dims.resize(static_cast<size_t>(input(0).dim()));
    std::iota(dims.begin(), dims.end(), 0);
  }
  return dims;
}

Strategy uniform(const OpCall& call, Placement placement) {
  Strategy strategy;
  strategy.inputs.assign(call.num_inputs(), placement);
  strategy.outputs.assign(std::max<size_t>(call.output_sizes.size(), 1), placement);
  return strategy;
}

}  // namespace longhaul::dtensor
