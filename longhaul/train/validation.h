// Loss on held-out data. Leaves no trace: no gradients, no statistics, no state of the run is
// touched.
#pragma once

#include "longhaul/data/dataset.h"
#include "longhaul/models/deepseek_v3/model.h"
#include "longhaul/train/metrics.h"

namespace longhaul::train {

struct ValidationOptions {
  int64_t batch_size = 8;
  int64_t max_batches = -1;  // -1: the whole pass
};

ValidationResult validate(const deepseek_v3::Model& model, const data::Dataset& dataset,
                          const ValidationOptions& options);

}  // namespace longhaul::train
