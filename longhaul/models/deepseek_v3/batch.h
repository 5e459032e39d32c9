// A batch as the model sees it: for the trunk and for each MTP module the slots it works on. All
// that depends on document boundaries is settled here, once, on the host: nothing crosses a
// document.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "longhaul/models/deepseek_v3/sequence_cut.h"

namespace longhaul::deepseek_v3 {

// What one tower (the trunk, or the MTP module of one depth) reads. All [B, S]; int64 but `valid`.
struct Slots {
  Tensor input_ids;  // 0 where not valid
  Tensor labels;     // -100: no loss
  Tensor positions;  // for rope; 0 where padding
  Tensor doc_start;  // index of the first slot of the slot's document; t + 1 where not valid. An
                     // index into the whole sequence, also of a slice
  Tensor valid;      // bool; false: padding, or (MTP) the token is missing: never attended, routed,
                     // counted
  // Of a slice: each slot's index in the whole sequence, the last key that it sees. Undefined where
  // the slots are the whole sequence.
  Tensor last_key;
  int64_t num_tokens = 0;  // valid slots
  int64_t num_labels = 0;  // slots with a label

  Slots to(at::Device device) const;
};

struct Batch {
  std::vector<Slots> towers;  // [0] the trunk, [k] the MTP module of depth k
  // Where the slots are a slice of each sequence: the way to the others.
  std::shared_ptr<const SequenceCut> cut;

  Batch to(at::Device device) const;
};

// Denominators of the losses: counts over the global (accumulated, data-parallel) batch, by tower.
struct GlobalCounts {
  std::vector<int64_t> tokens, labels;

  void add(const Batch& batch);
};

// input_ids, labels and position_ids are int64 [B, S + depth] on the host: the trunk reads the
// first `seq_len` = S slots, the MTP module of depth k the slots k .. k + S. Positions that restart
// mark documents; -1 marks padding. A document begins where a position is not its predecessor's
// plus one.
Batch prepare_batch(const Tensor& input_ids, const Tensor& labels, const Tensor& position_ids,
                    int64_t seq_len);

// The index of each slot's document start, [B, S]; t + 1 for padding.
Tensor document_starts(const Tensor& position_ids);

}  // namespace longhaul::deepseek_v3
