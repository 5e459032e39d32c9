// The router's choice (DeepSeek-V3 report, section 2.1.2): scores of the experts, the group-limited
// top-k over biased scores, and the gate weights from the unbiased scores of the chosen.
//   s = sigmoid(logits) or softmax(logits);  for choice only: s + bias
//   groups: score of a group = sum of its min(2, size) largest; the best topk_group stay
//   then the k largest; ties to the lowest expert (groups likewise)
//   weight = s_e / (sum over chosen of s + 1e-20) if normalised, times scale
// All in fp32 (fp64 for fp64). T tokens, E experts. With S = sum over chosen of s + 1e-20 and dw
// the gradient of the weights:
//   ds_e = scale / S (dw_e - sum over chosen of dw s / S) if normalised, else scale dw_e
//   dlogits = ds s (1 - s) or, softmax, s (ds - sum of s ds)
#pragma once

#include <ATen/core/Tensor.h>

#include "longhaul/ops/kernel.h"

namespace longhaul::ops {

using at::Tensor;

struct GatingOptions {
  int64_t k = 1;
  int64_t n_group = 1;
  int64_t topk_group = 1;
  bool softmax = false;  // else sigmoid
  bool normalize = true;
  double scale = 1.0;
};

struct Gating {
  Tensor scores_TE;
  Tensor experts_TK;  // int64, no gradient
  Tensor weights_TK;
};

// All three. `chosen_TK` (int64) repeats an earlier choice or, undefined, leaves it to the scores;
// bias [E] may be undefined. Throws Error for shapes, k and groups that do not fit. Fused: fp32 on
// the CPU, one pass forward and one backward, ties as stated; scores below 2^-126 may count as 0.
Gating moe_gating_top_k(const Tensor& logits_TE, const Tensor& bias_E, const GatingOptions& options,
                        const Tensor& chosen_TK = {}, Kernel kernel = Kernel::kReference);

// The gradient of the logits [T, E], without autograd, for callers that bring their own: from the
// choice that was made and the gradients of the weights and, where they are defined, of the scores.
// fp32 on the CPU.
Tensor moe_gating_top_k_grad(const Tensor& scores_TE, const Tensor& experts_TK,
                             const Tensor& d_weights_TK, const Tensor& d_scores_TE,
                             const GatingOptions& options);

// The definition in its three steps, in plain ATen.
// s [T, E] from logits [T, E]; differentiable.
Tensor gating_scores(const Tensor& logits_TE, const GatingOptions& options);

// The chosen experts [T, k], int64, by falling biased score; no gradient. bias [E] may be
// undefined.
Tensor choose_experts(const Tensor& scores_TE, const Tensor& bias_E, const GatingOptions& options);

// Gate weights [T, k] of the chosen experts; differentiable in the scores.
Tensor gate_weights(const Tensor& scores_TE, const Tensor& experts_TK,
                    const GatingOptions& options);

}  // namespace longhaul::ops
