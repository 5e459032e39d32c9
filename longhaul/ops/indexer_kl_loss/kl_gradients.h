// What the implementations of the indexer's loss share; nothing outside this folder includes it.
#pragma once

#include <functional>

#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"

namespace longhaul::ops {

// The keys that the loss looks at, and the main attention's head sum there.
struct KlTarget {
  Tensor indices_BSK;   // int32, -1: none; undefined: all visible keys
  Tensor doc_start_BS;  // only without indices
  Tensor head_sum;      // [B, S, K], or [B, S, S] without indices
  Tensor scores_BSK;    // I at the indices where the selection knows them, or undefined
};

// The definition, in plain ATen.
KlGradients indexer_kl_reference(const IndexerInputs& in, const KlTarget& target, bool with_grads);

// The same over one block of queries of one row of the batch, B = 1, all of whose keys `in` holds:
// head_sum and mask are [1, queries, keys].
struct KlBlock {
  KlGradients gradients;
  Tensor d_key;  // before it is rounded
};
KlBlock dense_kl_of_block_reference(const IndexerInputs& in, const Tensor& head_sum,
                                    const Tensor& mask, bool with_grads);

// What `compute` finds for the inputs' values, as a loss that they learn from. It is asked for
// gradients only where they are wanted.
Tensor loss_with_gradients(const IndexerInputs& in,
                           const std::function<KlGradients(bool with_grads)>& compute);

}  // namespace longhaul::ops
