// What goes through a forward pass beside the activations: which pass it is, the denominators of
// the losses, the statistics it records, and the discrete decisions it takes or repeats.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>

#include "longhaul/models/deepseek_v3/batch.h"
#include "longhaul/models/deepseek_v3/rope.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/saved_results.h"

namespace longhaul::deepseek_v3 {

// Statistics are recorded in kTrain and kEvaluate, never when a pass is recomputed; auxiliary
// losses are attached in kTrain and kRecompute.
enum class Pass { kTrain, kRecompute, kEvaluate };

// Sums over the micro-batches of a step, by layer (MTP modules count on after the last layer).
// Tensors stay on the device and are those of this rank's tokens, so that recording waits for
// nothing.
struct StepStats {
  std::map<int64_t, Tensor> indexer_loss;  // mean over the global batch's queries
  // The share of dense attention's mass that lies on the selected keys: mean over the global
  // batch's queries and over heads.
  std::map<int64_t, Tensor> indexer_recall;
  std::map<int64_t, Tensor> balance_loss;   // weighted
  std::map<int64_t, Tensor> z_loss;         // weighted
  std::map<int64_t, Tensor> expert_counts;  // [E] int64: tokens that chose each expert
};

// Adds `value` (detached) to the layer's entry.
void accumulate(std::map<int64_t, Tensor>& by_layer, int64_t layer, const Tensor& value);

// The choices of a pass that are not differentiable. Recorded when first asked for; a pass that
// finds them here repeats them, so a recomputed pass cannot choose differently.
struct Decisions {
  std::map<int64_t, Tensor> topk_indices;  // [B, S, K] int32
  std::map<int64_t, Tensor> topk_scores;   // [B, S, K], the indexer's at these keys
  std::map<int64_t, Tensor> experts;       // [T, k] int64
};

struct ForwardContext {
  Pass pass = Pass::kTrain;
  GlobalCounts counts;
  StepStats* stats = nullptr;
  bool measure_recall = false;  // of the indexer, where statistics are recorded
  Decisions* decisions = nullptr;
  // Called with named intermediate values; for tests and debugging.
  std::function<void(const std::string& name, int64_t layer, const Tensor& value)> probe;

  bool training() const { return pass != Pass::kEvaluate; }
  bool recording() const { return stats != nullptr && pass != Pass::kRecompute; }
};

// What every layer of one tower shares.
struct Sequence {
  const Slots* slots;
  RopeTable rope;
  int64_t global_tokens;             // valid slots of this tower in the global batch
  const SequenceCut* cut = nullptr;  // of the batch

  ops::KeyRange visible_keys() const { return {slots->doc_start, slots->last_key}; }
};

// The decision at `layer`, taken by `decide` unless it is already recorded. What `decide` calls is
// not called again by a recomputed pass, so that nothing of it is saved.
template <typename Decide>
Tensor decide_once(std::map<int64_t, Tensor>* recorded, int64_t layer, const Decide& decide) {
  const ops::SavedResults::Scope nothing(nullptr, ops::SavedResults::Phase::kForward);
  if (recorded == nullptr) return decide();
  auto found = recorded->find(layer);
  if (found == recorded->end()) found = recorded->emplace(layer, decide()).first;
  return found->second;
}

}  // namespace longhaul::deepseek_v3
