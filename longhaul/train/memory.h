// What the tensors of a training run hold on one rank, by kind. Host-side bookkeeping: waits for no
// device. Called by the trainer.
#pragma once

#include <vector>

#include "longhaul/nn/module.h"
#include "longhaul/optim/adam_w.h"
#include "longhaul/train/metrics.h"

namespace longhaul::train {

// Of the rank's parts of these, gradients as they are now.
MemoryByKind measure_memory(const std::vector<nn::NamedParameter>& parameters,
                            const std::vector<nn::NamedParameter>& buffers,
                            const optim::AdamW& optimizer, at::Device device);

}  // namespace longhaul::train
