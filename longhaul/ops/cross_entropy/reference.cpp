#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cross_entropy/cross_entropy.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::ops {

Tensor linear_cross_entropy_reference(const Tensor& hidden_TD, const Tensor& weight_VD,
                                      const Tensor& labels_T) {
  const Tensor logits = ops::linear(hidden_TD, weight_VD.to(hidden_TD.scalar_type()));
  return at::cross_entropy_loss(logits.to(wide_type(logits)), labels_T, /*weight=*/{},
                                at::Reduction::Sum, kIgnoredLabel);
}

}  // namespace longhaul::ops
