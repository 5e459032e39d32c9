// Floating-point operations of a training step, counted from the shape: what MFU divides by. Sparse
// attention is counted as sparse: a query multiplies with min(K, visible) keys, and only the
// indexer looks at every visible key. Norms, rope, softmax and the optimizer are left out, as is
// usual.
#pragma once

#include <cstdint>

#include "longhaul/models/deepseek_v3/model_config.h"
#include "longhaul/models/deepseek_v3/settings.h"

namespace longhaul::deepseek_v3 {

struct ParameterCounts {
  int64_t total = 0;
  int64_t active = 0;  // used by one token: of the routed experts only those it chooses
};

// Trunk, embedding, head and MTP modules.
ParameterCounts count_parameters(const ModelConfig& config, const ModelSettings& settings = {});

// Multiply-adds count as two. Forward and backward (three times the forward pass of what learns,
// once of what is frozen) of one sequence of `seq_len` tokens in one document.
double training_flops_per_sequence(const ModelConfig& config, const ModelSettings& settings,
                                   int64_t seq_len);

}  // namespace longhaul::deepseek_v3
