#include <ATen/ATen.h>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/cross_entropy/cross_entropy.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::ops {
namespace {

// As the kernel does. On other devices the labels are not read back for it.
void check_labels(const Tensor& labels_T, int64_t V) {
  if (!labels_T.device().is_cpu()) return;
  const Tensor labels = labels_T.contiguous();
  const auto* label = labels.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < labels.numel(); ++t) {
    LONGHAUL_CHECK(label[t] == kIgnoredLabel || (label[t] >= 0 && label[t] < V),
                   "linear_cross_entropy: a label is out of bounds: expected {} or 0 to {} (V - "
                   "1), got {} in row {}",
                   kIgnoredLabel, V - 1, label[t], t);
  }
}

}  // namespace

void check_cross_entropy(const Tensor& hidden_TD, const Tensor& weight_VD, const Tensor& labels_T) {
  check_dims(labels_T, 1, "cross-entropy: labels");
  check_dims(weight_VD, 2, "cross-entropy: weight");
  check_shape(hidden_TD, {labels_T.size(0), weight_VD.size(1)}, "cross-entropy: hidden");
  check_is_floating(hidden_TD, "cross-entropy: hidden");
  LONGHAUL_CHECK(labels_T.scalar_type() == at::kLong,
                 "cross-entropy: labels: expected Long, got {}",
                 c10::toString(labels_T.scalar_type()));
}

Tensor linear_cross_entropy_reference(const Tensor& hidden_TD, const Tensor& weight_VD,
                                      const Tensor& labels_T) {
  check_cross_entropy(hidden_TD, weight_VD, labels_T);
  check_labels(labels_T, weight_VD.size(0));
  const Tensor logits = ops::linear(hidden_TD, weight_VD.to(hidden_TD.scalar_type()));
  return at::cross_entropy_loss(logits.to(wide_type(logits)), labels_T, /*weight=*/{},
                                at::Reduction::Sum, kIgnoredLabel);
}

}  // namespace longhaul::ops
