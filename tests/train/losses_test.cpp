// The objective is a sum over tokens divided once by their global number, however they are spread.
#include "longhaul/train/losses.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <cmath>

namespace longhaul::train {
namespace {

namespace v3 = deepseek_v3;

// A model whose head is the linear model of 4 classes over 3 features.
std::unique_ptr<v3::Model> four_by_three() {
  v3::ModelConfig config;
  config.vocab_size = 4;
  config.hidden_size = 3;
  config.num_hidden_layers = 1;
  config.first_k_dense_replace = 1;
  config.intermediate_size = 2;
  config.num_attention_heads = 1;
  config.kv_lora_rank = config.qk_nope_head_dim = config.qk_rope_head_dim = config.v_head_dim = 2;
  v3::ModelSettings settings;
  settings.param_dtype = settings.compute_dtype = at::kDouble;
  return std::make_unique<v3::Model>(config, settings);
}

constexpr double kWeights[4][3] = {{1, -2, 0}, {3, 1, -1}, {0, 2, 1}, {-1, 0, 2}};
using Labels = std::array<int64_t, 8>;
constexpr int64_t kNone = -100;
// Two ranks with 8 labels each, of which 5 and 1 are valid.
constexpr Labels kLabels[2] = {{2, kNone, 0, 1, kNone, 3, 1, kNone},
                               {kNone, kNone, kNone, kNone, kNone, kNone, 2, kNone}};

// Feature i of a rank's token t: small integers, different for each token.
double feature(int64_t rank, int64_t t, int64_t i) {
  return static_cast<double>((3 * rank + 5 * t + 2 * i) % 7 - 3);
}

// Tokens begin .. begin + count - 1 of a rank.
struct Part {
  v3::Batch batch;
  at::Tensor hidden_BSD;
};

Part part_of(int64_t rank, int64_t begin, int64_t count) {
  at::Tensor labels = at::empty({1, count}, at::kLong);
  at::Tensor hidden = at::empty({1, count, 3}, at::kDouble);
  for (int64_t t = 0; t < count; ++t) {
    labels[0][t] = kLabels[rank][static_cast<size_t>(begin + t)];
    for (int64_t i = 0; i < 3; ++i) hidden[0][t][i] = feature(rank, begin + t, i);
  }
  const auto ids = at::zeros({1, count}, at::kLong);
  return {v3::prepare_batch(ids, labels, at::arange(count).unsqueeze(0), count), hidden};
}

struct Result {
  double loss = 0;
  at::Tensor gradient;  // of the weights, [4, 3]
};

// Each rank takes its 8 tokens in micro-batches of these lengths; what ranks reduce is the sum.
Result spread(const std::vector<int64_t>& lengths, bool one_rank_takes_all) {
  std::vector<std::vector<Part>> ranks(one_rank_takes_all ? 1 : 2);
  v3::GlobalCounts counts;
  for (int64_t rank = 0; rank < 2; ++rank) {
    int64_t begin = 0;
    for (const int64_t count : lengths) {
      auto& parts = ranks[one_rank_takes_all ? 0 : static_cast<size_t>(rank)];
      parts.push_back(part_of(rank, begin, count));
      counts.add(parts.back().batch);
      begin += count;
    }
  }
  EXPECT_EQ(counts.labels, std::vector<int64_t>{6});
  Result result{0, at::zeros({4, 3}, at::kDouble)};
  for (const auto& parts : ranks) {
    const auto model = four_by_three();
    at::Tensor weight;
    for (const auto& parameter : model->parameters()) {
      if (parameter.name == "lm_head.weight") weight = *parameter.tensor;
    }
    {
      const at::NoGradGuard no_grad;
      for (int64_t v = 0; v < 4; ++v) {
        for (int64_t i = 0; i < 3; ++i) weight[v][i] = kWeights[v][i];
      }
    }
    for (const auto& [batch, hidden_BSD] : parts) {
      const auto objective = compute_objective(*model, batch, {hidden_BSD}, counts, 0.3);
      torch::autograd::backward({objective.total}, {});
      result.loss += objective.by_tower[0].item<double>();
    }
    result.gradient += weight.grad();
  }
  return result;
}

// The same by loops over the six tokens.
Result by_hand() {
  Result result{0, at::zeros({4, 3}, at::kDouble)};
  for (int64_t rank = 0; rank < 2; ++rank) {
    for (int64_t t = 0; t < 8; ++t) {
      const int64_t label = kLabels[rank][static_cast<size_t>(t)];
      if (label == kNone) continue;
      double exps[4], sum = 0;
      for (int64_t v = 0; v < 4; ++v) {
        double logit = 0;
        for (int64_t i = 0; i < 3; ++i) logit += kWeights[v][i] * feature(rank, t, i);
        sum += exps[v] = std::exp(logit);
      }
      result.loss -= std::log(exps[label] / sum) / 6;
      for (int64_t v = 0; v < 4; ++v) {
        for (int64_t i = 0; i < 3; ++i) {
          result.gradient[v][i] += (exps[v] / sum - (v == label)) * feature(rank, t, i) / 6;
        }
      }
    }
  }
  return result;
}

// pytorch/torchtitan 1842 and 2206: a mean for each rank or micro-batch would weigh the single
// token of the second as much as the five of the first.
TEST(Losses, EachTokenWeighsTheSameHoweverTheyAreSpread) {
  const Result expected = by_hand();
  const auto expect_same = [&](const char* what, const Result& actual) {
    EXPECT_NEAR(actual.loss, expected.loss, 1e-12) << what;
    EXPECT_LT((actual.gradient - expected.gradient).abs().max().item<double>(), 1e-12) << what;
  };
  expect_same("two ranks", spread({8}, false));
  expect_same("accumulation over two", spread({8}, true));
  expect_same("two ranks that accumulate over two", spread({4, 4}, false));
  expect_same("a micro-batch without labels", spread({3, 3, 2}, false));
}

}  // namespace
}  // namespace longhaul::train
