// Run folders made by hand.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "longhaul/base/file.h"
#include "longhaul/train/metrics.h"
#include "tests/support/temp_folder.h"

namespace longhaul::test {

// A step of a small model with two layers, the second with three experts.
inline train::StepMetrics small_step(int64_t step) {
  train::StepMetrics metrics;
  metrics.step = step;
  metrics.lm_loss = 5.0 - 0.5 * static_cast<double>(step);
  metrics.loss = metrics.lm_loss + 0.25;
  metrics.indexer_loss = 0.3;
  metrics.indexer_loss_per_layer = {0.25, 0.35};
  metrics.indexer_recall_per_layer = {0.5, 0.75};
  metrics.grad_norm = 1.5;
  metrics.lr = 1e-3;
  metrics.tokens = 100 * step;
  metrics.tokens_per_second = 500;
  metrics.mfu = 0.25;
  metrics.memory_peak_bytes = int64_t{1} << 30;
  metrics.time = 1.75e9 + static_cast<double>(step);
  metrics.expert_load[1] = {30, 0, 60};
  metrics.memory = train::MemoryByKind{
      .weights = 1 << 20, .gradients = 2 << 20, .optimizer = 3 << 20, .activations = 4 << 20};
  metrics.seconds = {{"forward", 0.25}, {"backward", 0.5}};
  return metrics;
}

// A run folder with these steps.
inline void write_run(const fs::path& folder, const std::vector<train::StepMetrics>& steps) {
  std::string lines;
  for (const auto& step : steps) lines += train::to_json(step).dump() + "\n";
  fs::create_directories(folder);
  spill(folder / "metrics.jsonl", lines);
}

}  // namespace longhaul::test
