#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <limits>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::ops {
namespace {

// The K largest visible entries of each row, ties to the lowest index. at::topk leaves the order of
// ties open, so it only provides the threshold. NaN counts as the largest score: a row keeps its
// keys and the NaN travels on to the loss, where it is seen.
Tensor select_topk(const Tensor& scores_BSS, const Tensor& visible_BSS, int64_t K) {
  const double lowest = -std::numeric_limits<double>::infinity();
  const Tensor masked = scores_BSS.masked_fill(scores_BSS != scores_BSS, -lowest)
                            .masked_fill_(visible_BSS.logical_not(), lowest);
  const Tensor threshold =
      std::get<0>(masked.topk(K, -1, /*largest=*/true, /*sorted=*/false)).amin(-1, true);
  const Tensor above = masked > threshold;
  const Tensor ties = (masked == threshold).logical_and_(visible_BSS);
  const Tensor wanted = K - above.sum(-1, true);
  return ties.logical_and(ties.cumsum(-1) <= wanted).logical_or_(above);
}

}  // namespace

Tensor indexer_scores(const Tensor& query_BSHD, const Tensor& key_BSD, const Tensor& weights_BSH) {
  return indexer_scores_and_dots({query_BSHD, key_BSD, weights_BSH}).scores_BSS;
}

IndexerScores indexer_scores_and_dots(const IndexerInputs& in) {
  check_indexer_inputs(in);
  const int64_t B = in.query_BSHD.size(0), S = in.query_BSHD.size(1), H = in.query_BSHD.size(2),
                L = in.key_BSD.size(1);
  const auto wide = wide_type(in.query_BSHD);
  const Tensor dots = product(in.query_BSHD.to(wide).reshape({B, S * H, in.query_BSHD.size(3)}),
                              in.key_BSD.to(wide).transpose(1, 2))
                          .relu_()
                          .view({B * S, H, L});
  return {product(in.weights_BSH.to(wide).reshape({B * S, 1, H}), dots).view({B, S, L}), dots};
}

IndexerScoresGradients indexer_scores_grad(const IndexerInputs& in, Tensor& dots,
                                           const Tensor& d_scores_BSS) {
  const int64_t B = in.query_BSHD.size(0), S = in.query_BSHD.size(1), H = in.query_BSHD.size(2);
  const auto wide = wide_type(in.query_BSHD);
  const Tensor q = in.query_BSHD.to(wide).reshape({B, S * H, in.query_BSHD.size(3)}),
               k = in.key_BSD.to(wide);
  const Tensor w = in.weights_BSH.to(wide).reshape({B * S, H, 1});
  const Tensor d_scores = d_scores_BSS.reshape({B * S, 1, d_scores_BSS.size(2)});
  IndexerScoresGradients result;
  result.grads.weights_BSH = product(dots, d_scores.transpose(1, 2))
                                 .view(in.weights_BSH.sizes())
                                 .to(in.weights_BSH.scalar_type());
  const Tensor d_dots = dots.gt_(0).mul_(d_scores).mul_(w).view({B, S * H, d_scores.size(2)});
  result.grads.query_BSHD =
      product(d_dots, k).view(in.query_BSHD.sizes()).to(in.query_BSHD.scalar_type());
  result.d_key = product(d_dots.transpose(1, 2), q);
  result.grads.key_BSD = result.d_key.to(in.key_BSD.scalar_type());
  return result;
}

IndexerInputs lightning_indexer_grad_reference(const IndexerInputs& in, const Tensor& indices_BSK,
                                               const Tensor& d_scores_BSK) {
  const at::NoGradGuard no_grad;
  const int64_t B = in.query_BSHD.size(0), S = in.query_BSHD.size(1), L = in.key_BSD.size(1);
  const auto wide = wide_type(in.query_BSHD);
  const Tensor index = indices_BSK.to(at::kLong);
  // Added to key 0 where there is no key.
  const Tensor d_chosen = d_scores_BSK.to(wide).masked_fill(index < 0, 0);
  std::vector<Tensor> d_query, d_weights;
  Tensor d_key = at::zeros(in.key_BSD.sizes(), in.key_BSD.options().dtype(wide));
  for (int64_t t = 0; t == 0 || t < S; t += kQueryBlock) {
    const int64_t count = std::min(kQueryBlock, S - t);
    const IndexerInputs block = {in.query_BSHD.narrow(1, t, count), in.key_BSD,
                                 in.weights_BSH.narrow(1, t, count)};
    const Tensor d_scores =
        at::zeros({B, count, L}, d_chosen.options())
            .scatter_add_(2, index.narrow(1, t, count).clamp_min(0), d_chosen.narrow(1, t, count));
    Tensor dots = indexer_scores_and_dots(block).dots;
    const auto gradients = indexer_scores_grad(block, dots, d_scores);
    d_query.push_back(gradients.grads.query_BSHD);
    d_weights.push_back(gradients.grads.weights_BSH);
    d_key.add_(gradients.d_key);
  }
  return {at::cat(d_query, 1), d_key.to(in.key_BSD.scalar_type()), at::cat(d_weights, 1)};
}

Tensor mask_to_indices(const Tensor& selected_BSS, int64_t K) {
  const int64_t B = selected_BSS.size(0), S = selected_BSS.size(1), keys = selected_BSS.size(2);
  // Unselected keys all land in a last slot that is cut off.
  const Tensor slot = (selected_BSS.cumsum(-1) - 1).masked_fill_(selected_BSS.logical_not(), K);
  const auto int32 = selected_BSS.options().dtype(at::kInt);
  const Tensor key = at::arange(keys, int32).expand({B, S, keys});
  return at::full({B, S, K + 1}, -1, int32).scatter_(2, slot, key).narrow(2, 0, K).contiguous();
}

Tensor indices_to_mask(const Tensor& indices_BSK, int64_t S) {
  const int64_t B = indices_BSK.size(0), rows = indices_BSK.size(1);
  // -1 lands in a first slot that is cut off; an index of S or more is out of range for the
  // scatter.
  const Tensor slot = indices_BSK.to(at::kLong).clamp_min(-1).add_(1);
  return at::zeros({B, rows, S + 1}, indices_BSK.options().dtype(at::kBool))
      .scatter_(2, slot, true)
      .narrow(2, 1, S);
}

IndexerSelection lightning_indexer_reference(const Tensor& query_BSHD, const Tensor& key_BSD,
                                             const Tensor& weights_BSH, const KeyRange& range,
                                             int64_t topk) {
  const at::NoGradGuard no_grad;
  const int64_t S = query_BSHD.size(1), L = key_BSD.size(1), K = std::min(topk, L);
  std::vector<Tensor> indices, scores;
  for (int64_t t = 0; t == 0 || t < S; t += kQueryBlock) {
    const int64_t count = std::min(kQueryBlock, S - t);
    const Tensor visible =
        visible_mask({range.first_BS.narrow(1, t, count), range.last().narrow(1, t, count)}, L);
    const int64_t seen = range.last_BS.defined() ? keys_up_to_last(visible) : t + count;
    const Tensor block_scores =
        indexer_scores(query_BSHD.narrow(1, t, count), key_BSD.narrow(1, 0, seen),
                       weights_BSH.narrow(1, t, count));
    const Tensor selected =
        select_topk(block_scores, visible.narrow(2, 0, seen), std::min(K, seen));
    indices.push_back(mask_to_indices(selected, K));
    const Tensor index = indices.back().to(at::kLong);
    scores.push_back(block_scores.gather(2, index.clamp_min(0)).masked_fill_(index < 0, 0));
  }
  return {at::cat(indices, 1), at::cat(scores, 1)};
}

}  // namespace longhaul::ops
