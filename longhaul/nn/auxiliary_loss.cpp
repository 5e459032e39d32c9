#include "longhaul/nn/auxiliary_loss.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace longhaul::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct AttachLoss : torch::autograd::Function<AttachLoss> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& loss) {
    ctx->saved_data["loss_like"] = at::ones_like(loss);
    return x.view_as(x);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {grads[0], ctx->saved_data["loss_like"].toTensor()};
  }
};

}  // namespace

at::Tensor attach_loss(const at::Tensor& x, const at::Tensor& loss) {
  if (!loss.requires_grad()) return x;
  if (!x.requires_grad()) {
    torch::autograd::backward({loss}, {});
    return x;
  }
  return AttachLoss::apply(x, loss);
}

}  // namespace longhaul::nn
