// Activation checkpointing (Chen et al., 2016): a part of the model whose activations are not kept
// but computed again when its backward pass begins.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "longhaul/ops/saved_results.h"

namespace longhaul::nn {

// f(inputs, again): `again` is false now, without gradients, and true in the backward pass. It must
// compute the same both times. Gradients reach `inputs` and whatever parameters f uses; what f
// holds must live until then. At least one input must require a gradient. What `saves` names is
// kept from the first time and not run again.
at::Tensor recompute(std::function<at::Tensor(const std::vector<at::Tensor>& inputs, bool again)> f,
                     const std::vector<at::Tensor>& inputs, const ops::SavePolicy& saves = {});

}  // namespace longhaul::nn
