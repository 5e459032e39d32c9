// A model small enough for finite differences in fp64 that has every part: query latent, dense and
// mixture-of-experts layers with groups, indexer with fewer keys than positions, MTP of depth 2;
// and batches of packed, padded documents for it.
#pragma once

#include <ATen/core/grad_mode.h>

#include <string>
#include <vector>

#include "longhaul/nn/init.h"
#include "tests/models/model_fixture.h"
#include "tests/support/tensors.h"

namespace longhaul::testing {

inline v3::ModelConfig tiny_config() {
  v3::ModelConfig c;
  c.vocab_size = 23;
  c.hidden_size = 12;
  c.num_hidden_layers = 2;
  c.first_k_dense_replace = 1;
  c.intermediate_size = 10;
  c.num_attention_heads = 2;
  c.q_lora_rank = 6;
  c.kv_lora_rank = 5;
  c.qk_nope_head_dim = 4;
  c.qk_rope_head_dim = 4;
  c.v_head_dim = 3;
  c.index_n_heads = 2;
  c.index_head_dim = 8;
  c.index_topk = 3;
  c.n_routed_experts = 6;
  c.n_shared_experts = 1;
  c.num_experts_per_tok = 2;
  c.moe_intermediate_size = 7;
  c.n_group = 3;
  c.topk_group = 2;
  c.routed_scaling_factor = 2.5;
  c.num_nextn_predict_layers = 2;
  return c;
}

inline v3::ModelSettings fp64_settings() {
  v3::ModelSettings s;
  s.param_dtype = s.compute_dtype = at::kDouble;
  return s;
}

// Weights that make every term matter: norms are not 1, biases not 0.
inline void randomize(v3::Model& model, uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (const auto& list : {model.parameters(), model.buffers()}) {
    for (const auto& parameter : list) {
      const bool matrix = parameter.init == nn::Init::kNormal;
      nn::fill_normal(*parameter.tensor, CounterRng(seed, parameter.name), matrix ? 0.35 : 0.15);
      if (parameter.init == nn::Init::kOnes) parameter.tensor->add_(1);
    }
  }
}

inline std::unique_ptr<v3::Model> tiny_model(const v3::ModelConfig& config = tiny_config(),
                                             const v3::ModelSettings& settings = fp64_settings()) {
  auto model = std::make_unique<v3::Model>(config, settings);
  randomize(*model, 5);
  return model;
}

using Document = std::vector<int64_t>;

// Documents of these lengths over a vocabulary of 23, all different.
inline std::vector<Document> documents(const std::vector<int64_t>& lengths) {
  std::vector<Document> result;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto ids = integers({lengths[i]}, 23, 900 + i);
    result.emplace_back(ids.data_ptr<int64_t>(), ids.data_ptr<int64_t>() + lengths[i]);
  }
  return result;
}

// What the data loader hands over, before prepare_batch. [B, S + depth].
struct Rows {
  at::Tensor ids, labels, positions;

  v3::Batch batch(int64_t seq_len) const {
    return v3::prepare_batch(ids, labels, positions, seq_len);
  }
};

// One row for each list of documents, padded to `width`. An empty document is one slot of padding.
// Labels are the next token of the same document, none (-100) at its end. Padding holds `garbage`.
inline Rows pack(const std::vector<std::vector<Document>>& rows, int64_t width,
                 int64_t garbage = 0) {
  const auto B = static_cast<int64_t>(rows.size());
  Rows out{at::full({B, width}, garbage, at::kLong), at::full({B, width}, garbage, at::kLong),
           at::full({B, width}, -1, at::kLong)};
  for (int64_t b = 0; b < B; ++b) {
    int64_t t = 0;
    for (const auto& document : rows[b]) {
      const auto n = static_cast<int64_t>(document.size());
      for (int64_t i = 0; i < n; ++i, ++t) {
        out.ids[b][t] = document[i];
        out.labels[b][t] = i + 1 < n ? document[i + 1] : -100;
        out.positions[b][t] = i;
      }
      if (n == 0) ++t;
    }
  }
  return out;
}

inline constexpr int64_t kTinySeqLen = 13;

// Two rows of 13 + 2: short and long documents, padding between and at the end, one document that
// goes on beyond the trunk's slots.
inline Rows tiny_rows(int64_t garbage = 0) {
  const auto d = documents({5, 1, 7, 2, 3, 6});
  return pack({{d[0], d[1], {}, d[2]}, {d[3], {}, d[4], d[5]}}, kTinySeqLen + 2, garbage);
}

inline v3::Batch tiny_batch() { return tiny_rows().batch(kTinySeqLen); }

// Everything of one pass.
struct Run {
  double total = 0;              // cross-entropy of all towers, weighed
  std::vector<double> by_tower;  // mean cross-entropy
  v3::StepStats stats;
  Tensors gradients;

  static double sum(const std::map<int64_t, at::Tensor>& by_layer) {
    double value = 0;
    for (const auto& [layer, x] : by_layer) value += x.item<double>();
    return value;
  }
};

// Forward and backward; `pass` and `decisions` as in ForwardContext.
inline Run run(v3::Model& model, const v3::Batch& batch, v3::Decisions* decisions = nullptr,
               v3::Pass pass = v3::Pass::kTrain) {
  Run result;
  v3::ForwardContext ctx;
  ctx.pass = pass;
  ctx.counts.add(batch);
  ctx.stats = &result.stats;
  ctx.decisions = decisions;
  zero_gradients(model);
  const auto losses = forward_losses(model, batch, ctx);
  backward(losses.total);
  result.total = losses.total.item<double>();
  result.by_tower = losses.by_tower;
  result.gradients = gradients(model);
  zero_gradients(model);
  return result;
}

inline bool is_indexer(const std::string& name) {
  return name.find(".indexer.") != std::string::npos;
}

// The names on which two sets of gradients differ by more than `tolerance` of the tensor's maximum,
// or which only one of them has.
inline std::vector<std::string> differing(const Tensors& actual, const Tensors& expected,
                                          double tolerance) {
  std::vector<std::string> names;
  for (const auto& [name, value] : expected) {
    const auto found = actual.find(name);
    if (found == actual.end() || !(relative_to_max(found->second, value) <= tolerance)) {
      names.push_back(name);
    }
  }
  for (const auto& [name, value] : actual) {
    if (expected.count(name) == 0) names.push_back(name + " (unexpected)");
  }
  return names;
}

}  // namespace longhaul::testing
