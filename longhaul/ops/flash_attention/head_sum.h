// The sum over heads of the probabilities of a dense attention that has run, made again from its
// saved statistics block by block of queries: what the indexer learns from in the dense warm-up,
// without anything of size S x S. This is the first half of Ascend's
// dense_lightning_indexer_grad_kl_loss; the second one is in ops/indexer_kl_loss, and an all-reduce
// over shards of the heads may stand between.
//   head_sum[s,t] = sum over h of exp(scale * q[t,h] . k[s(,h)] - max[t,h]) / sum[t,h]
#pragma once

#include <memory>
#include <vector>

#include "longhaul/ops/flash_attention/flash_attention.h"

namespace longhaul::ops {

// Queries of one row of the batch, and the run of keys in which all lie that one of them sees.
struct QueryBlock {
  int64_t row;
  int64_t query, queries;  // the first, and how many
  int64_t key, keys;
};

// Blocks of kQueryBlock queries (fewer at the end of a row), without those that see no key. On the
// Meta device all keys are seen.
std::vector<QueryBlock> query_blocks(const KeyRange& range, int64_t num_keys);

// Whether each of the block's queries sees each of its keys, [queries, keys].
Tensor visible_mask(const KeyRange& range, const QueryBlock& block);

// Head sums come with their queries filled up to a multiple of this: the kernels take so many.
inline constexpr int64_t kHeadSumGroup = 32;

class HeadSums {
 public:
  // Throws Error for shapes that do not fit. The fused kernel must cover the operands.
  HeadSums(const AttentionState& attention, const KeyRange& range, Kernel kernel);
  ~HeadSums();
  HeadSums(const HeadSums&) = delete;
  HeadSums& operator=(const HeadSums&) = delete;

  // [keys, Q] in fp32 (fp64 for fp64), Q = queries rounded up to a multiple of kHeadSumGroup; 0
  // where a query does not see the key or is not there.
  Tensor of(const QueryBlock& block) const;

  const AttentionState& attention() const { return attention_; }
  const KeyRange& range() const { return range_; }

 private:
  struct Operands;  // of the fused kernel

  AttentionState attention_;
  KeyRange range_;
  std::unique_ptr<Operands> operands_;
};

// All blocks together, [B, S, keys]: of the attention's queries by all keys.
Tensor whole_head_sum(const HeadSums& sums, at::ScalarType dtype);

// By definition, and of every key: [queries, keys].
Tensor head_sum_without_mask(const AttentionState& attention, const QueryBlock& block);

}  // namespace longhaul::ops
