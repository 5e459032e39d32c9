// Looks for numbers that are not finite in a model. Decides nothing: the trainer does, before each
// update, and the run, before each save.
#pragma once

#include <string>

#include "longhaul/dtensor/communicator.h"
#include "longhaul/models/deepseek_v3/model.h"

namespace longhaul::train {

// NaN in a router's bias moves only the choice of experts: neither the loss nor the gradients show
// it. One reduction over all layers, so one wait for the device.
bool router_biases_are_finite(deepseek_v3::Model& model);

// The name of the first weight or router bias that holds NaN or infinity on any rank; empty if
// there is none. Reads all weights. Collective.
std::string find_nonfinite(const deepseek_v3::Model& model, const dtensor::Communicator& all);

}  // namespace longhaul::train
