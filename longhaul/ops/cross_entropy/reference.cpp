#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/cross_entropy/cross_entropy.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::ops {

Tensor linear_cross_entropy(const Tensor& hidden_TD, const Tensor& weight_VD,
                            const Tensor& labels_T) {
  check_dims(labels_T, 1, "cross-entropy: labels");
  check_dims(weight_VD, 2, "cross-entropy: weight");
  check_shape(hidden_TD, {labels_T.size(0), weight_VD.size(1)}, "cross-entropy: hidden");
  const Tensor logits = ops::linear(hidden_TD, weight_VD);
  return at::cross_entropy_loss(logits.to(wide_type(logits)), labels_T, /*weight=*/{},
                                at::Reduction::Sum, kIgnoredLabel);
}

}  // namespace longhaul::ops
