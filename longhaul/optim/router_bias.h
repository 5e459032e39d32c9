// Load balancing without an auxiliary loss (Wang et al., 2024): after the backward pass the bias of
// an expert that got fewer tokens than the mean rises by `speed`, of one that got more it falls.
//   d = speed * sign(mean(count) - count);   bias += d - mean(d) (zero-mean form) or d
#pragma once

#include <ATen/core/Tensor.h>

namespace longhaul::optim {

// bias [E] floating, counts [E] int64 over the global batch. Does nothing at speed 0.
void update_router_bias(at::Tensor& bias_E, const at::Tensor& counts_E, double speed,
                        bool zero_mean);

}  // namespace longhaul::optim
