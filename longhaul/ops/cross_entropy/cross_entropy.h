// Cross-entropy together with the output projection.
//   loss = sum over valid t of  logsumexp(W h[t]) - (W h[t])[label[t]],   label -100 is ignored
// in fp32 (fp64 for fp64). A sum: the caller divides once by the global number of valid labels.
// hidden [T, D] or [B, S, D], weight [V, D] of any floating dtype (cast to that of hidden), labels
// int64 [T] or [B, S]: a scalar. In bf16 logits and their gradient are rounded once each; all
// between is fp32.
//   dlogits[t] = softmax(logits[t]) - onehot(label[t]),   dhidden = dlogits W,   dW = dlogits^T
//   hidden
#pragma once

#include <ATen/core/Tensor.h>

#include "longhaul/ops/kernel.h"

namespace longhaul::ops {

inline constexpr int64_t kIgnoredLabel = -100;

// Throws Error for shapes that do not fit and labels outside 0 .. V - 1. Fused: fp32 and bf16 on
// the CPU; there are never more logits than those of a few tokens at a time: 64 MiB in fp32, half
// of that in bf16, beside them in fp32 where it computes products so. The gradients are computed
// with the loss and kept, so it can be differentiated once; dW is summed up in fp32.
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight_VD,
                                const at::Tensor& labels, Kernel kernel = Kernel::kReference);

// hidden [..., D] and labels [...] or [T] as tokens one after the other. Throws Error for labels of
// other sizes than hidden's.
struct LabelledTokens {
  at::Tensor hidden_TD, labels_T;
};
LabelledTokens labelled_tokens(const at::Tensor& hidden, const at::Tensor& labels);

// The loss and its gradients at once, without autograd, for callers that bring their own; those
// that are not wanted stay undefined. fp32 and bf16 on the CPU; d_weight is in fp32.
struct CrossEntropyGradients {
  at::Tensor loss, d_hidden_TD, d_weight_VD;
};
struct WantedOfCrossEntropy {
  bool d_hidden, d_weight;
  bool any() const { return d_hidden || d_weight; }
};
CrossEntropyGradients linear_cross_entropy_gradients(const at::Tensor& hidden_TD,
                                                     const at::Tensor& weight_VD,
                                                     const at::Tensor& labels_T,
                                                     WantedOfCrossEntropy wanted);

// Throws Error for shapes and dtypes that do not fit.
void check_cross_entropy(const at::Tensor& hidden_TD, const at::Tensor& weight_VD,
                         const at::Tensor& labels_T);

// The definition, in plain ATen.
at::Tensor linear_cross_entropy_reference(const at::Tensor& hidden_TD, const at::Tensor& weight_VD,
                                          const at::Tensor& labels_T);

}  // namespace longhaul::ops
