// The indexer's loss: how far its distribution over the keys is from the main attention's.
//   p[t,.] = head_sum[t,.] / sum,   r[t,.] = softmax of I[t,.] over the same keys
//   loss = sum over t and s of p (log p - log r);   p = 0 contributes 0
//   dI = r - p,  dw[t,j] = sum_s dI relu(q_j . k),  d(q_j . k) = dI w[t,j] where q_j . k > 0
// (DeepSeek-V3.2 report, equations 3 and 4.) The loss is a sum over queries, not yet divided by
// their number; p is a constant. This is the tail of Ascend's
// sparse_lightning_indexer_grad_kl_loss; its first half, the head sum, comes from the attention, so
// that an all-reduce over heads can stand between. Forward computes the gradients too, so backward
// only scales them. Layouts: see ops/lightning_indexer. A query without keys contributes nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "longhaul/ops/flash_attention/head_sum.h"
#include "longhaul/ops/kernel.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"

namespace longhaul::ops {

using at::Tensor;

// Over the selected keys: indices [B, S, K] int32 (-1: none), head_sum [B, S, K]. A scalar. The
// fused kernel is spared a pass where it gets the scores I at the indices, as
// ops::lightning_indexer returns them. What head_sum and scores hold where the index is -1 does not
// count.
Tensor sparse_indexer_kl_loss(const IndexerInputs& indexer, const Tensor& indices_BSK,
                              const Tensor& head_sum_BSK, Kernel kernel = Kernel::kReference,
                              const Tensor& scores_BSK = {});

// Where each rank holds some of the attention's heads: together they make the head sums of all
// its queries, and each the loss of a slice of these.
struct HeadShards {
  struct Slice {
    int64_t first, count;
  };
  std::vector<Slice> slices;  // of the attention's queries, by rank
  size_t rank;
  // Adds up over the ranks terms [ranks, ...], of which rank r gets what stands at r. Called as
  // often, and with the same sizes, on each.
  std::function<Tensor(const Tensor& terms)> reduce_scatter;
};

struct DenseLossOptions {
  Kernel kernel = Kernel::kReference;
  std::optional<HeadShards> shards = std::nullopt;
};

// Over all visible keys (dense warm-up), of the attention that has just run, whose queries and
// range these are; with shards the indexer's queries are this rank's slice of them, and the loss is
// the slice's. Computed block by block of queries (see ops/flash_attention/head_sum.h), so that
// nothing is of size S x S. A scalar.
Tensor dense_indexer_kl_loss(const IndexerInputs& indexer, const AttentionState& attention,
                             const KeyRange& range, const DenseLossOptions& options = {});

// The loss together with its gradients, without autograd, for callers that bring their own.
struct KlGradients {
  Tensor loss;          // scalar
  IndexerInputs grads;  // in the inputs' dtypes; undefined where they are not wanted
};
KlGradients sparse_indexer_kl_gradients(const IndexerInputs& indexer, const Tensor& indices_BSK,
                                        const Tensor& head_sum_BSK, Kernel kernel);

// The softmax of the index scores over all visible keys; log-sum-exp = max + ln(sum). Both [B, S]
// in fp32 (fp64 for fp64), 0 for a query that sees no key.
struct IndexerSoftmax {
  Tensor max_BS, sum_BS;
};
IndexerSoftmax dense_indexer_softmax(const IndexerInputs& indexer, const KeyRange& range,
                                     Kernel kernel);

// With the head sums that head_sum_of gives for a block as HeadSums does; it is asked for each
// block once, in order.
struct DenseGradientsOptions {
  Kernel kernel = Kernel::kReference;
  IndexerSoftmax softmax = {};  // where it is known
};
KlGradients dense_indexer_kl_gradients(const IndexerInputs& indexer, const KeyRange& range,
                                       const std::function<Tensor(const QueryBlock&)>& head_sum_of,
                                       const DenseGradientsOptions& options);

// The definition, from head_sum [B, S, S] as flash_attention returns it.
Tensor dense_indexer_kl_loss(const IndexerInputs& indexer, const Tensor& doc_start_BS,
                             const Tensor& head_sum_BSS, Kernel kernel = Kernel::kReference);

}  // namespace longhaul::ops
