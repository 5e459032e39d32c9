// What the implementations of the indexer's loss share; nothing outside this folder includes it.
#pragma once

#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"

namespace longhaul::ops {

// The keys that the loss looks at, and the main attention's head sum there.
struct KlTarget {
  Tensor indices_BSK;   // int32, -1: none; undefined: all visible keys
  Tensor doc_start_BS;  // only without indices
  Tensor head_sum;      // [B, S, K], or [B, S, S] without indices
  Tensor scores_BSK;    // I at the indices where the selection knows them, or undefined
};

struct KlGradients {
  Tensor loss;          // scalar
  IndexerInputs grads;  // in the inputs' dtypes; undefined where they are not wanted
};

// The definition, in plain ATen.
KlGradients indexer_kl_reference(const IndexerInputs& in, const KlTarget& target, bool with_grads);

}  // namespace longhaul::ops
