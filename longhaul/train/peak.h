// The limit that MFU is a share of: the rate of large matrix products on this device, measured.
#pragma once

#include <ATen/core/Tensor.h>

namespace longhaul::train {

// Floating-point operations a second (a multiply-add is two) of square products in `dtype`: after a
// warm-up the best of at least five rounds, each of as many products as take a hundredth of a
// second. Takes about a tenth of a second, more only where five products do.
double measure_peak_flops(at::Device device, at::ScalarType dtype);

}  // namespace longhaul::train
