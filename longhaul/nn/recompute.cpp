#include "longhaul/nn/recompute.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

namespace longhaul::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Function = std::function<at::Tensor(const std::vector<at::Tensor>&, bool)>;

using ops::SavedResults;

// Carries the function, and what it saves, from the forward to the backward pass.
struct Holder : torch::CustomClassHolder {
  Holder(Function f, const ops::SavePolicy& saves) : f(std::move(f)) {
    if (!saves.operators.empty()) results = std::make_unique<SavedResults>(saves);
  }

  at::Tensor compute(const variable_list& inputs, bool again) const {
    const SavedResults::Scope scope(
        results.get(), again ? SavedResults::Phase::kRecompute : SavedResults::Phase::kForward);
    return f(inputs, again);
  }

  Function f;
  std::unique_ptr<SavedResults> results;
};

struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(AutogradContext* ctx, const c10::intrusive_ptr<Holder>& holder,
                            at::TensorList inputs) {
    ctx->save_for_backward(inputs.vec());
    ctx->saved_data["f"] = c10::IValue::make_capsule(holder);
    return holder->compute(inputs.vec(), /*again=*/false);  // autograd is off here
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto holder =
        c10::static_intrusive_pointer_cast<Holder>(ctx->saved_data["f"].toCapsule());
    variable_list inputs;
    for (const auto& saved : ctx->get_saved_variables()) {
      inputs.push_back(saved.detach().set_requires_grad(saved.requires_grad()));
    }
    {
      const at::AutoGradMode on(true);
      const at::Tensor out = holder->compute(inputs, /*again=*/true);
      torch::autograd::backward({out}, {grads[0]});
    }
    variable_list result = {at::Tensor()};  // of the holder
    for (const auto& input : inputs) result.push_back(input.grad());
    return result;
  }
};

}  // namespace

at::Tensor recompute(Function f, const std::vector<at::Tensor>& inputs,
                     const ops::SavePolicy& saves) {
  return Recompute::apply(c10::make_intrusive<Holder>(std::move(f), saves), at::TensorList(inputs));
}

}  // namespace longhaul::nn
