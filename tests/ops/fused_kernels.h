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

// Relative, but to elements of size `floor` where less is expected: with one key in a row dS
// vanishes.
inline double frobenius(const at::Tensor& actual, const at::Tensor& expected, double floor = 1) {
  const auto e = expected.to(at::kDouble), d = actual.to(at::kDouble) - e;
  const double norm = e.norm().item<double>(), error = d.norm().item<double>();
  return error / std::max(norm, floor * std::sqrt(static_cast<double>(e.numel())));
}

// The floor for what is small as a rule: head sums, the indexer's loss and the gradients of its
// operands.
inline constexpr double kSmall = 0.01;

}  // namespace longhaul::testing
