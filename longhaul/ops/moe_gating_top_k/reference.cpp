#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <limits>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/moe_gating_top_k/check.h"
#include "longhaul/ops/moe_gating_top_k/moe_gating_top_k.h"

namespace longhaul::ops {
namespace {

// Indices of the k largest by row, ties to the lowest index.
Tensor stable_topk(const Tensor& x, int64_t k) {
  return std::get<1>(at::sort(x, /*stable=*/true, /*dim=*/-1, /*descending=*/true))
      .narrow(-1, 0, k);
}

// -inf for the experts whose group is not among the best.
Tensor limit_to_groups(const Tensor& choice_TE, const GatingOptions& options) {
  const int64_t T = choice_TE.size(0), E = choice_TE.size(1);
  const int64_t size = div_exact(E, options.n_group, "experts in n_group groups");
  const Tensor grouped = choice_TE.view({T, options.n_group, size});
  const Tensor group_score = std::get<0>(grouped.topk(std::min<int64_t>(2, size), -1)).sum(-1);
  const Tensor kept = at::zeros_like(group_score, at::kBool)
                          .scatter_(1, stable_topk(group_score, options.topk_group), true);
  return grouped
      .masked_fill(kept.logical_not().unsqueeze(-1), -std::numeric_limits<double>::infinity())
      .view({T, E});
}

}  // namespace

Tensor gating_scores(const Tensor& logits_TE, const GatingOptions& options) {
  const Tensor logits = logits_TE.to(wide_type(logits_TE));
  return options.softmax ? at::softmax(logits, -1) : at::sigmoid(logits);
}

Tensor choose_experts(const Tensor& scores_TE, const Tensor& bias_E, const GatingOptions& options) {
  check_gating(scores_TE, bias_E, options);
  const at::NoGradGuard no_grad;
  const Tensor biased = bias_E.defined() ? scores_TE + bias_E : scores_TE.detach();
  return stable_topk(options.n_group > 1 ? limit_to_groups(biased, options) : biased, options.k)
      .contiguous();
}

Tensor gate_weights(const Tensor& scores_TE, const Tensor& experts_TK,
                    const GatingOptions& options) {
  check_shape(experts_TK, {scores_TE.size(0), kAnySize}, "chosen experts");
  Tensor weights = scores_TE.gather(1, experts_TK);
  if (options.normalize) weights = weights / (weights.sum(-1, true) + 1e-20);
  return weights * options.scale;
}

}  // namespace longhaul::ops
