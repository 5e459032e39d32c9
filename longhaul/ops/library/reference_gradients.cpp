#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/ops/library/operators.h"

namespace longhaul::ops::library {
namespace {

// Dispatch with autograd, in spite of the guards of the callers.
struct WithAutograd {
  c10::InferenceMode no_inference{false};
  at::AutoGradMode gradients{true};
  c10::impl::ForceDispatchKeyGuard keys{c10::impl::tls_local_dispatch_key_set().included_,
                                        c10::impl::tls_local_dispatch_key_set().excluded_ -
                                            c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

}  // namespace

std::vector<Tensor> reference_gradients(const std::function<Tensor(const std::vector<Tensor>&)>& f,
                                        const std::vector<Tensor>& inputs, const Tensor& d_out) {
  const WithAutograd guard;
  std::vector<Tensor> leaves;
  for (const Tensor& x : inputs) leaves.push_back(x.detach().clone().set_requires_grad(true));
  const Tensor out = f(leaves);
  auto gradients = torch::autograd::grad({out}, leaves, {d_out.detach().clone()});
  for (Tensor& gradient : gradients) gradient = gradient.detach().contiguous();
  return gradients;
}

}  // namespace longhaul::ops::library
