// What both implementations of the router's choice ask of their arguments.
#pragma once

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/moe_gating_top_k/moe_gating_top_k.h"

namespace longhaul::ops {

// Of the scores, or the logits that become them.
inline void check_gating(const Tensor& scores_TE, const Tensor& bias_E,
                         const GatingOptions& options) {
  check_dims(scores_TE, 2, "router scores");
  LONGHAUL_CHECK(options.k >= 1 && options.k <= scores_TE.size(1),
                 "router: k: expected 1 to {} experts, got {}", scores_TE.size(1), options.k);
  LONGHAUL_CHECK(options.topk_group >= 1 && options.topk_group <= options.n_group,
                 "router: topk_group: expected 1 to {} groups, got {}", options.n_group,
                 options.topk_group);
  div_exact(scores_TE.size(1), options.n_group, "router: experts in n_group groups");
  if (bias_E.defined()) check_shape(bias_E, {scores_TE.size(1)}, "router bias");
}

}  // namespace longhaul::ops
