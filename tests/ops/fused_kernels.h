// The fixture of the tests that ctest runs once for each instruction set.
#pragma once

#include <gtest/gtest.h>

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

}  // namespace longhaul::testing
