// Selective activation checkpointing by operator: a part of the model that is recomputed in the
// backward pass (nn/recompute.h) may save the results of some operators, so that the recomputation
// does not run them again. Operators that can be saved compute through saved_or_computed(), below
// autograd: the recomputed graph is the same, whether a result was saved or not. Nothing here
// differentiates, and outside of a Scope nothing is saved.
// The reference of attention is many operations of ATen's whose intermediate results autograd
// needs: it is not an operator here, and always recomputed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <array>
#include <deque>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace longhaul::ops {

using at::Tensor;

// The names of the operators that can be saved; nn::Linear's products are "linear".
const std::vector<std::string>& savable_operators();

// What a recomputed part saves. Of the products "linear" it saves every second one, from the first
// on (TorchTitan's rule): they are many, and half of the memory saves half of the work.
struct SavePolicy {
  std::vector<std::string> operators;  // of savable_operators()
  // Sizes [out, in] of weights whose products are neither saved nor counted.
  std::vector<std::array<int64_t, 2>> recomputed_weights = {};
};

// A call of an operator that can be saved.
struct SavableCall {
  std::string_view op;             // a literal
  at::IntArrayRef weight_NK = {};  // linear: the weight's sizes
};

// The results of one forward pass of one part, which a recomputation takes, each once.
class SavedResults {
 public:
  explicit SavedResults(SavePolicy policy) : policy_(std::move(policy)) {}

  enum class Phase { kForward, kRecompute };

  // As long as it lives, operators that this thread calls save their results in `results`, or take
  // them from there; with nullptr they do neither. Scopes nest. A second recomputation finds
  // nothing left and computes all.
  class Scope {
   public:
    Scope(SavedResults* results, Phase phase);
    ~Scope();
    Scope(const Scope&) = delete;

   private:
    SavedResults* outer_;
  };

 private:
  friend std::vector<Tensor> saved_or_computed_list(
      const SavableCall& call, c10::function_ref<std::vector<Tensor>()> compute);

  struct Entry {
    std::string_view op;
    bool saved;
    std::vector<Tensor> results;
    std::vector<int64_t> versions;  // of the results as they were saved
  };

  bool saves(const SavableCall& call);
  void save(const SavableCall& call, const std::vector<Tensor>& results);
  Entry take(const SavableCall& call);

  SavePolicy policy_;
  Phase phase_ = Phase::kForward;
  std::deque<Entry> entries_;  // every call, saved or not, in order
  int64_t products_ = 0;       // so far, of weights that may be saved
  bool recomputed_ = false;
};

// The results of `compute`, or those that the forward pass saved of this call. Throws Error if a
// recomputation calls other operators than the forward pass did, or if a saved result has been
// written to. For the `forward` of an autograd function.
std::vector<Tensor> saved_or_computed_list(const SavableCall& call,
                                           c10::function_ref<std::vector<Tensor>()> compute);

// The same of functions that return a Tensor or a list of them.
template <typename F>
std::invoke_result_t<F> saved_or_computed(const SavableCall& call, const F& compute) {
  if constexpr (std::is_same_v<std::invoke_result_t<F>, Tensor>) {
    return saved_or_computed_list(call, [&] { return std::vector<Tensor>{compute()}; })[0];
  } else {
    return saved_or_computed_list(call, compute);
  }
}

}  // namespace longhaul::ops
