// Loss on held-out data. Leaves no trace: no gradients, no statistics, no state of the run is
// touched.
#pragma once

#include "longhaul/data/dataset.h"
#include "longhaul/models/deepseek_v3/model.h"
#include "longhaul/parallel/context.h"
#include "longhaul/parallel/fsdp.h"
#include "longhaul/parallel/parallel_dims.h"
#include "longhaul/train/metrics.h"

namespace longhaul::train {

struct ValidationOptions {
  int64_t batch_size = 8;    // of a rank
  int64_t max_batches = -1;  // of a rank; -1: the whole pass
};

// On one rank.
ValidationResult validate(const deepseek_v3::Model& model, const data::Dataset& dataset,
                          const ValidationOptions& options);

// What the ranks make of the model and its batches.
struct RanksOfModel {
  const parallel::ParallelDims& dims;
  parallel::Fsdp& fsdp;
  const parallel::ContextParallel* context;  // or nullptr
};

// On the ranks of `dims`, each with rows of its own or a slice of them; every one gets the result.
// Collective.
ValidationResult validate(const deepseek_v3::Model& model, const data::Dataset& dataset,
                          const ValidationOptions& options, const RanksOfModel& ranks);

}  // namespace longhaul::train
