// Text from a model: one token after the other, each from the whole context (no cache: it is a look
// at what was learned, not a serving engine).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "longhaul/models/deepseek_v3/model.h"

namespace longhaul::train {

struct GenerateOptions {
  int64_t max_new_tokens = 100;
  double temperature = 0.0;  // 0: greedy, the lowest id among equals
  double top_p = 1.0;        // the smallest set of likeliest tokens with at least this mass
  uint64_t seed = 0;
  int64_t max_context = 2048;  // older tokens are forgotten
  int64_t stop_token = -1;     // end of text, or -1
  // Ids that may be drawn; all if empty. A model's vocabulary may be larger than the tokenizer's.
  std::function<bool(int32_t)> may_draw = {};
};

// The tokens that follow `prompt` (which must not be empty), without it. `on_token` is called with
// each as it comes. UserError if the model's logits are not finite.
std::vector<int32_t> generate(const deepseek_v3::Model& model, std::vector<int32_t> prompt,
                              const GenerateOptions& options,
                              const std::function<void(int32_t)>& on_token);

// The choice from logits [V]: exposed for tests. `draw` is uniform in [0, 1).
int64_t sample_token(const at::Tensor& logits_V, double temperature, double top_p, double draw);

}  // namespace longhaul::train
