// A step's figures under the names that TensorBoard and Weights & Biases show: "loss/total",
// "indexer_loss/layer_3". Called by results/step_writer.
#pragma once

#include <utility>
#include <vector>

#include "longhaul/train/metrics.h"
#include "longhaul/train/results/event_file.h"

namespace longhaul::train {

// All that this step has; bytes in GiB, MFU as a share of 1. Expert load as the largest and the
// smallest share of a layer's tokens over the mean share.
Scalars scalars_of(const StepMetrics& metrics);

}  // namespace longhaul::train
