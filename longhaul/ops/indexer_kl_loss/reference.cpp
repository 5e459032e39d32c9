#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/indexer_kl_loss/kl_gradients.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"

namespace longhaul::ops {
namespace {

constexpr double kMasked = -1e30;

struct Divergence {
  Tensor loss;      // scalar
  Tensor d_scores;  // r - p, in the shape of the scores, 0 where masked
};

// KL(p || softmax(scores)) over the last dimension where `mask` holds.
Divergence divergence(const Tensor& scores, const Tensor& head_sum, const Tensor& mask) {
  const Tensor mass = head_sum.sum(-1, true);
  const Tensor p = head_sum / mass.clamp_min(1e-30);
  const Tensor log_r = at::log_softmax(scores.masked_fill(mask.logical_not(), kMasked), -1);
  const Tensor counts = mask.logical_and(mass > 0);
  const Tensor terms = at::xlogy(p, p) - p * log_r.masked_fill(mask.logical_not(), 0);
  return {terms.sum(), (log_r.exp() - p) * counts};
}

// Where the loss looks: scores are gathered at `indices` [B, S, K], or taken whole if undefined.
struct KeySet {
  Tensor indices;  // int64, -1 replaced by 0; undefined: all keys
  Tensor mask;     // true where a key stands

  // Those of queries [t, t + count), and how many leading keys hold them all.
  KeySet block(int64_t t, int64_t count, int64_t seen) const {
    const Tensor rows = mask.narrow(1, t, count);
    if (indices.defined()) return {indices.narrow(1, t, count), rows};
    return {{}, rows.narrow(2, 0, seen)};
  }
  int64_t keys_of_block(int64_t t, int64_t count, int64_t S) const {
    if (!indices.defined()) return keys_up_to_last(mask.narrow(1, t, count));
    const Tensor rows = indices.narrow(1, t, count);
    return rows.is_meta() || rows.numel() == 0 ? S : rows.max().item<int64_t>() + 1;
  }
  Tensor gather(const Tensor& scores_BSS) const {
    return indices.defined() ? scores_BSS.gather(2, indices) : scores_BSS;
  }
  // Gradients of masked entries are 0, so that adding them to key 0 changes nothing.
  Tensor scatter(const Tensor& d_scores, int64_t S) const {
    if (!indices.defined()) return d_scores;
    return at::zeros({d_scores.size(0), d_scores.size(1), S}, d_scores.options())
        .scatter_add_(2, indices, d_scores);
  }
};

struct BlockResult {
  Tensor loss;
  IndexerInputs grads;  // of the inputs, in their dtypes; undefined without `with_grads`
  Tensor d_key;         // before it is rounded
};

BlockResult kl_loss_of_block(const IndexerInputs& in, const Tensor& head_sum, const KeySet& keys,
                             bool with_grads) {
  auto [scores, dots] = indexer_scores_and_dots(in);
  const Tensor of_keys =
      head_sum.to(wide_type(in.query_BSHD)).masked_fill(keys.mask.logical_not(), 0);
  const auto [loss, d_chosen] = divergence(keys.gather(scores), of_keys, keys.mask);
  if (!with_grads) return {.loss = loss, .grads = {}, .d_key = {}};
  const auto [grads, d_key] = indexer_scores_grad(in, dots, keys.scatter(d_chosen, scores.size(2)));
  return {.loss = loss, .grads = grads, .d_key = d_key};
}

}  // namespace

KlBlock dense_kl_of_block_reference(const IndexerInputs& in, const Tensor& head_sum,
                                    const Tensor& mask, bool with_grads) {
  const auto block = kl_loss_of_block(in, head_sum, {.indices = {}, .mask = mask}, with_grads);
  return {.gradients = {block.loss, block.grads}, .d_key = block.d_key};
}

KlGradients indexer_kl_reference(const IndexerInputs& in, const KlTarget& target, bool with_grads) {
  const Tensor& head_sum = target.head_sum;
  KeySet keys{.indices = {}, .mask = {}};
  if (target.indices_BSK.defined()) {
    const Tensor index = target.indices_BSK.to(at::kLong);
    keys = {.indices = index.clamp_min(0), .mask = index >= 0};
  } else {
    keys.mask = visible_mask(target.doc_start_BS);
  }
  const int64_t S = in.query_BSHD.size(1), L = in.key_BSD.size(1);
  if (S <= kQueryBlock) {
    const auto whole = kl_loss_of_block(in, head_sum, keys, with_grads);
    return {whole.loss, whole.grads};
  }
  KlGradients total;
  std::vector<Tensor> d_query, d_weights;
  Tensor d_key;
  for (int64_t t = 0; t < S; t += kQueryBlock) {
    const int64_t count = std::min(kQueryBlock, S - t), seen = keys.keys_of_block(t, count, L);
    const Tensor sums = head_sum.narrow(1, t, count);
    const auto block =
        kl_loss_of_block({in.query_BSHD.narrow(1, t, count), in.key_BSD.narrow(1, 0, seen),
                          in.weights_BSH.narrow(1, t, count)},
                         keys.indices.defined() ? sums : sums.narrow(2, 0, seen),
                         keys.block(t, count, seen), with_grads);
    total.loss = t == 0 ? block.loss : total.loss + block.loss;
    if (!with_grads) continue;
    d_query.push_back(block.grads.query_BSHD);
    d_weights.push_back(block.grads.weights_BSH);
    if (t == 0) d_key = at::zeros(in.key_BSD.sizes(), block.d_key.options());
    d_key.narrow(1, 0, seen).add_(block.d_key);
  }
  if (with_grads) {
    total.grads = {at::cat(d_query, 1), d_key.to(in.key_BSD.scalar_type()), at::cat(d_weights, 1)};
  }
  return total;
}

}  // namespace longhaul::ops
