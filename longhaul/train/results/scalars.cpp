#include "longhaul/train/results/scalars.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace longhaul::train {
namespace {

constexpr double kGiB = 1 << 30;

double gib(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }

void add_by_layer(const std::string& group, const std::vector<double>& values, Scalars& out) {
  for (size_t i = 0; i < values.size(); ++i) {
    out.emplace_back(fmt::format("{}/layer_{}", group, i), values[i]);
  }
}

void add_expert_load(const StepMetrics& m, Scalars& out) {
  for (const auto& [layer, load] : m.expert_load) {
    const auto total = std::accumulate(load.begin(), load.end(), 0.0);
    if (total == 0) continue;
    const double mean = total / static_cast<double>(load.size());
    const auto [least, most] = std::minmax_element(load.begin(), load.end());
    out.emplace_back(fmt::format("expert_load_max/layer_{}", layer),
                     static_cast<double>(*most) / mean);
    out.emplace_back(fmt::format("expert_load_min/layer_{}", layer),
                     static_cast<double>(*least) / mean);
  }
}

void add_memory(const StepMetrics& m, Scalars& out) {
  out.emplace_back("memory/peak_gib", gib(m.memory_peak_bytes));
  if (!m.memory) return;
  out.emplace_back("memory/weights_gib", gib(m.memory->weights));
  out.emplace_back("memory/gradients_gib", gib(m.memory->gradients));
  out.emplace_back("memory/optimizer_gib", gib(m.memory->optimizer));
  if (m.memory->activations) {
    out.emplace_back("memory/activations_gib", gib(*m.memory->activations));
  }
}

}  // namespace

Scalars scalars_of(const StepMetrics& m) {
  Scalars out = {{"loss/total", m.loss},
                 {"loss/lm", m.lm_loss},
                 {"loss/mtp", m.mtp_loss},
                 {"loss/indexer", m.indexer_loss},
                 {"loss/balance", m.balance_loss},
                 {"loss/z", m.z_loss},
                 {"grad_norm", m.grad_norm},
                 {"lr", m.lr},
                 {"throughput/tokens", static_cast<double>(m.tokens)},
                 {"throughput/tokens_per_second", m.tokens_per_second},
                 {"throughput/mfu", m.mfu}};
  if (m.validation) {
    out.emplace_back("validation/loss", m.validation->loss);
    if (m.validation->bits_per_byte) {
      out.emplace_back("validation/bits_per_byte", *m.validation->bits_per_byte);
    }
  }
  if (!m.comm.empty()) out.emplace_back("throughput/comm_wait_share", m.comm_wait_share);
  for (const auto& [part, seconds] : m.seconds) out.emplace_back("seconds/" + part, seconds);
  add_memory(m, out);
  add_by_layer("indexer_loss", m.indexer_loss_per_layer, out);
  add_by_layer("indexer_recall", m.indexer_recall_per_layer, out);
  add_expert_load(m, out);
  return out;
}

}  // namespace longhaul::train
