// The router, a token at a time: scores, groups, choice and weights while the row is in the first
// cache; and the gradient of its logits.
#include "include/longhaul/kernels.h"
#include "longhaul/ops/cpu/kernel_table.h"
#include "longhaul/ops/cpu/rows.h"
#include "longhaul/ops/cpu/sigmoid.h"
#include "longhaul/ops/cpu/workspace.h"

namespace longhaul::cpu::LONGHAUL_ISA {
namespace {

using Args = longhaul_moe_gating_top_k_args;
using GradArgs = longhaul_moe_gating_top_k_grad_args;

constexpr float kTiny = 1e-20F;
constexpr int32_t kTaken = INT32_MIN;  // below the key of -inf

// Integers in the order of the numbers, -0 as 0 and NaN above all, as at::sort has it.
LONGHAUL_INLINE Words to_keys(Floats x) {
  const Words bits = Words(x + 0.0F), keys = bits ^ ((bits >> 31) & 0x7fffffff);
  return choose(x != x, all_words(INT32_MAX), keys);
}
int32_t to_key(float x) { return to_keys(all(x))[0]; }
float from_key(int32_t key) {
  const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

void sigmoid_row(const float* logits, int64_t E, float* scores) {
  for_lanes(E, [&](int64_t i, auto part) LONGHAUL_INLINED {
    const Sigmoid s = sigmoid(load_as_floats(logits + i, part));
    put(scores + i, s.of_x / s.divisor, part);
  });
}

void softmax_row(const float* logits, int64_t E, float* scores) {
  float most = logits[0];
  for (int64_t e = 1; e < E; ++e) most = logits[e] > most ? logits[e] : most;
  for_lanes(E, [&](int64_t i, auto part) LONGHAUL_INLINED {
    put(scores + i, exp2((load_as_floats(logits + i, part) - most) * kLog2E), part);
  });
  const float sum = sum_over(
      E, [&](int64_t i, auto part) LONGHAUL_INLINED { return load_as_floats(scores + i, part); });
  for_lanes(E, [&](int64_t i, auto part) LONGHAUL_INLINED {
    put(scores + i, load_as_floats(scores + i, part) / sum, part);
  });
}

// What one run of tokens chooses by: keys [width] of the experts and [n_group] of the groups.
struct Keys {
  int32_t *experts, *groups;
};

// The experts' keys; whole vectors, taken behind the last one.
void write_keys(const Args& a, const float* scores, int32_t* keys) {
  for_lanes(a.E, [&](int64_t i, auto part) LONGHAUL_INLINED {
    Floats biased = load_as_floats(scores + i, part);
    if (a.bias) biased += load_as_floats(a.bias + i, part);
    store_words(keys + i, to_keys(biased));
  });
  for (int64_t e = a.E; e < round_up(a.E, kLanes); ++e) keys[e] = kTaken;
}

// The index of the largest key, the lowest of several. `keys` are whole vectors.
int64_t index_of_largest(const int32_t* keys, int64_t width) {
  Words best = load_words(keys), where = lane_numbers();
  for (int64_t i = kLanes; i < width; i += kLanes) {
    const Words here = load_words(keys + i), larger = here > best;
    best = choose(larger, here, best);
    where = choose(larger, lane_numbers() + static_cast<int32_t>(i), where);
  }
  int32_t key[kLanes], index[kLanes];
  store_words(key, best);
  store_words(index, where);
  int lane = 0;
  for (int i = 1; i < kLanes; ++i) {
    if (key[i] > key[lane] || (key[i] == key[lane] && index[i] < index[lane])) lane = i;
  }
  return index[lane];
}

// A group counts as much as its two best experts together.
int32_t key_of_group(const int32_t* keys, int64_t size) {
  int32_t first = kTaken, second = kTaken;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t smaller = keys[i] < first ? keys[i] : first;
    first = keys[i] > first ? keys[i] : first;
    second = smaller > second ? smaller : second;
  }
  return size == 1 ? first : to_key(from_key(first) + from_key(second));
}

void limit_to_groups(const Args& a, const Keys& keys) {
  const int64_t size = a.E / a.n_group, width = round_up(a.n_group, kLanes);
  for (int64_t g = 0; g < width; ++g) {
    keys.groups[g] = g < a.n_group ? key_of_group(keys.experts + g * size, size) : kTaken;
  }
  for (int64_t i = 0; i < a.topk_group; ++i)
    keys.groups[index_of_largest(keys.groups, width)] = kTaken;
  const int32_t lowest = to_key(-__builtin_inff());
  for (int64_t g = 0; g < a.n_group; ++g) {
    if (keys.groups[g] == kTaken) continue;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) keys.experts[e] = lowest;
  }
}

void choose_experts(const Args& a, const float* scores, const Keys& keys, int64_t* experts) {
  write_keys(a, scores, keys.experts);
  if (a.n_group > 1) limit_to_groups(a, keys);
  for (int64_t i = 0; i < a.k; ++i) {
    experts[i] = index_of_largest(keys.experts, round_up(a.E, kLanes));
    keys.experts[experts[i]] = kTaken;
  }
}

float sum_of_chosen(const Args& a, const float* scores, const int64_t* experts) {
  float sum = 0;
  for (int64_t i = 0; i < a.k; ++i) sum += scores[experts[i]];
  return sum + kTiny;
}

void run_token(const Args& a, int64_t token, const Keys& keys) {
  float* scores = a.scores + token * a.E;
  int64_t* experts = a.experts + token * a.k;
  const float* logits = a.logits + token * a.E;
  a.softmax ? softmax_row(logits, a.E, scores) : sigmoid_row(logits, a.E, scores);
  if (!a.chosen) choose_experts(a, scores, keys, experts);
  const float divisor = a.normalize ? sum_of_chosen(a, scores, experts) : 1;
  for (int64_t i = 0; i < a.k; ++i) {
    a.weights[token * a.k + i] = scores[experts[i]] / divisor * a.scale;
  }
}

// d(scores) of choice i: of the weight itself, and of the sum that divides all of them.
struct ChosenGradient {
  float factor, along;
  float of(float d_weight) const { return (d_weight - along) * factor; }
};

ChosenGradient chosen_gradient(const Args& a, const float* scores, const int64_t* experts,
                               const float* d_weights) {
  if (!a.normalize) return {a.scale, 0};
  const float sum = sum_of_chosen(a, scores, experts);
  float dot = 0;
  for (int64_t i = 0; i < a.k; ++i) dot += d_weights[i] * scores[experts[i]];
  return {a.scale / sum, dot / sum};
}

// sigmoid: dx = ds s (1 - s);  softmax: dx = s (ds - sum of s ds), the sum over chosen and given.
void run_grad(const GradArgs& g, int64_t token) {
  const Args& a = g.forward;
  const float* s = a.scores + token * a.E;
  const float* d_scores = g.d_scores ? g.d_scores + token * a.E : nullptr;
  const float* d_weights = g.d_weights + token * a.k;
  const int64_t* experts = a.experts + token * a.k;
  float* d_logits = g.d_logits + token * a.E;
  const ChosenGradient chosen = chosen_gradient(a, s, experts, d_weights);
  const auto given = [&](int64_t i, auto part) LONGHAUL_INLINED {
    return d_scores ? load_as_floats(d_scores + i, part) : Floats{};
  };
  float along = 0;
  if (a.softmax) {
    const auto weighed = [&](int64_t i, auto part) LONGHAUL_INLINED {
      return given(i, part) * load_as_floats(s + i, part);
    };
    along = sum_over(a.E, weighed);
    for (int64_t i = 0; i < a.k; ++i) along += s[experts[i]] * chosen.of(d_weights[i]);
  }
  for_lanes(a.E, [&](int64_t i, auto part) LONGHAUL_INLINED {
    const Floats v = load_as_floats(s + i, part), d = given(i, part);
    put(d_logits + i, a.softmax ? v * (d - along) : d * v * (1.0F - v), part);
  });
  for (int64_t i = 0; i < a.k; ++i) {
    const float v = s[experts[i]];
    d_logits[experts[i]] += chosen.of(d_weights[i]) * (a.softmax ? v : v * (1 - v));
  }
}

// Runs of tokens, each with keys of its own.
struct Blocks {
  int64_t tokens, count, expert_width, group_width;
  int32_t* keys;

  Blocks(const Args& a, Workspace& workspace) {
    constexpr int64_t kMost = 512, kFewestTokens = 16;
    tokens = (a.T + kMost - 1) / kMost;
    if (tokens < kFewestTokens) tokens = kFewestTokens;
    count = (a.T + tokens - 1) / tokens;
    expert_width = round_up(a.E, kLanes);
    group_width = round_up(a.n_group, kLanes);
    keys = workspace.take<int32_t>(count * (expert_width + group_width));
  }
  Keys of(int64_t block) const {
    int32_t* experts = keys + block * (expert_width + group_width);
    return {experts, experts + expert_width};
  }
};

}  // namespace

size_t moe_gating_top_k_workspace(const Args& a) {
  Workspace workspace(nullptr);
  const Blocks blocks(a, workspace);
  return workspace.bytes();
}

void moe_gating_top_k(const Args& a, void* memory) {
  Workspace workspace(memory);
  const Blocks blocks(a, workspace);
  in_parallel<false>(blocks.count, blocks.tokens * a.E, [&](int64_t block) {
    const int64_t end = (block + 1) * blocks.tokens;
    for (int64_t token = block * blocks.tokens; token < (end < a.T ? end : a.T); ++token) {
      run_token(a, token, blocks.of(block));
    }
  });
}

void moe_gating_top_k_grad(const GradArgs& g) {
  in_parallel<false>(g.forward.T, g.forward.E, [&](int64_t token) { run_grad(g, token); });
}

}  // namespace longhaul::cpu::LONGHAUL_ISA
