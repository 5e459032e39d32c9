// The fixture of the tests that ctest runs once for each instruction set, and their measure of
// error.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "longhaul/ops/cpu/isa.h"

namespace longhaul::testing {

// Skips where the processor cannot run the instruction set that LONGHAUL_ISA names.
template <typename Param>
class FusedKernels : public ::testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    const char* wanted = std::getenv("LONGHAUL_ISA");
    for (const auto isa : cpu::kAllIsas) {
      if (wanted && std::string(wanted) == cpu::name_of(isa) && !cpu::is_supported(isa)) {
        GTEST_SKIP() << "this processor has no " << wanted;
      }
    }
  }
};

// Relative, but by element of size 1 where less is expected: with one key in a row dS vanishes.
inline double frobenius(const at::Tensor& actual, const at::Tensor& expected) {
  const auto e = expected.to(at::kDouble), d = actual.to(at::kDouble) - e;
  const double scale = e.norm().item<double>(), error = d.norm().item<double>();
  return error / std::max(scale, std::sqrt(static_cast<double>(e.numel())));
}

}  // namespace longhaul::testing
