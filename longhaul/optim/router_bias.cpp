#include "longhaul/optim/router_bias.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace longhaul::optim {

void update_router_bias(at::Tensor& bias_E, const at::Tensor& counts_E, double speed,
                        bool zero_mean) {
  if (speed == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor counts = counts_E.to(bias_E.options());
  const at::Tensor d = (counts.mean() - counts).sign() * speed;
  bias_E.add_(zero_mean ? d - d.mean() : d);
}

}  // namespace longhaul::optim
