#include "longhaul/models/deepseek_v3/batch.h"

#include <ATen/ATen.h>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/cross_entropy/cross_entropy.h"

namespace longhaul::deepseek_v3 {
namespace {

int64_t count(const Tensor& mask) { return mask.sum().item<int64_t>(); }

// The trunk (depth 0) or the MTP module of one depth. Slot t reads token t + depth, which must
// stand in the same document as t.
Slots slots_of_depth(const Tensor& input_ids, const Tensor& labels, const Tensor& positions,
                     const Tensor& doc_start, int64_t S, int64_t depth) {
  const Tensor t_S = at::arange(S, positions.options());
  const auto own = [&](const Tensor& x) { return x.narrow(1, 0, S); };
  const auto shifted = [&](const Tensor& x) { return x.narrow(1, depth, S); };
  Slots slots;
  slots.valid = (own(positions) >= 0)
                    .logical_and_(shifted(positions) >= 0)
                    .logical_and_(shifted(doc_start) <= t_S);
  const Tensor invalid = slots.valid.logical_not();
  slots.input_ids = shifted(input_ids).masked_fill(invalid, 0);
  slots.labels = shifted(labels).masked_fill(invalid, ops::kIgnoredLabel);
  slots.positions = own(positions).clamp_min(0);
  slots.doc_start = at::where(slots.valid, own(doc_start), t_S + 1);
  slots.num_tokens = count(slots.valid);
  slots.num_labels = count(slots.labels != ops::kIgnoredLabel);
  return slots;
}

}  // namespace

Slots Slots::to(at::Device device) const {
  Slots moved = *this;
  for (Tensor* x : {&moved.input_ids, &moved.labels, &moved.positions, &moved.doc_start,
                    &moved.valid, &moved.last_key}) {
    if (x->defined()) *x = x->to(device);
  }
  return moved;
}

Batch Batch::to(at::Device device) const {
  Batch moved;
  moved.cut = cut;
  for (const auto& slots : towers) moved.towers.push_back(slots.to(device));
  return moved;
}

void GlobalCounts::add(const Batch& batch) {
  tokens.resize(batch.towers.size(), 0);
  labels.resize(batch.towers.size(), 0);
  for (size_t i = 0; i < batch.towers.size(); ++i) {
    tokens[i] += batch.towers[i].num_tokens;
    labels[i] += batch.towers[i].num_labels;
  }
}

Tensor document_starts(const Tensor& position_ids) {
  const int64_t S = position_ids.size(1);
  const Tensor t_S = at::arange(S, position_ids.options());
  // A predecessor of the first slot that nothing continues.
  const Tensor before = at::full({position_ids.size(0), 1}, -2, position_ids.options());
  const Tensor previous = at::cat({before, position_ids.narrow(1, 0, S - 1)}, 1);
  const Tensor continues = (position_ids == previous + 1).logical_and_(previous >= 0);
  const Tensor starts = at::where(continues, at::zeros_like(t_S), t_S);
  const Tensor doc_start = std::get<0>(starts.cummax(1));
  return at::where(position_ids >= 0, doc_start, t_S + 1);
}

Batch prepare_batch(const Tensor& input_ids, const Tensor& labels, const Tensor& position_ids,
                    int64_t seq_len) {
  ops::check_dims(input_ids, 2, "input_ids");
  LONGHAUL_CHECK(input_ids.sizes() == labels.sizes() && input_ids.sizes() == position_ids.sizes() &&
                     seq_len >= 1 && input_ids.size(1) >= seq_len,
                 "batch: input_ids [{}], labels [{}], position_ids [{}], seq_len {}",
                 ops::shape_text(input_ids), ops::shape_text(labels), ops::shape_text(position_ids),
                 seq_len);
  const Tensor doc_start = document_starts(position_ids);
  Batch batch;
  for (int64_t depth = 0; depth <= input_ids.size(1) - seq_len; ++depth) {
    batch.towers.push_back(
        slots_of_depth(input_ids, labels, position_ids, doc_start, seq_len, depth));
  }
  return batch;
}

}  // namespace longhaul::deepseek_v3
