// The limit that MFU is a share of: the rate of large matrix products on this device, measured.
#pragma once

#include <ATen/core/Tensor.h>

namespace longhaul::train {

// Floating-point operations a second (a multiply-add is two) of a square product in `dtype`, the
// best of a few short runs; about a tenth of a second.
double measure_peak_flops(at::Device device, at::ScalarType dtype);

}  // namespace longhaul::train
