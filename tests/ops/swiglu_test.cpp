#include "longhaul/ops/swiglu/swiglu.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

const Function kSwiglu = [](const Inputs& x) { return ops::swiglu(x[0], x[1]); };

TEST(Swiglu, EqualsTheFormula) {
  const auto gate = normal({5, 7}, 1, 3.0), up = normal({5, 7}, 2);
  const auto out = ops::swiglu(gate, up);
  for (int64_t i = 0; i < out.numel(); ++i) {
    const double g = gate.view(-1)[i].item<double>(), u = up.view(-1)[i].item<double>();
    EXPECT_NEAR(out.view(-1)[i].item<double>(), g / (1 + std::exp(-g)) * u, 1e-14);
  }
}

TEST(Swiglu, Gradients) {
  EXPECT_LT(gradient_error(kSwiglu, {normal({5, 7}, 1, 3.0), normal({5, 7}, 2)}), 1e-8);
}

// Rounding to bf16 is 2^-9 relative; silu and the product round once each.
TEST(Swiglu, Precision) {
  const Inputs x = {normal({64, 33}, 1, 2.0), normal({64, 33}, 2)};
  EXPECT_LT(precision_error(kSwiglu, x, at::kFloat), 2e-7);
  EXPECT_LT(precision_error(kSwiglu, x, at::kBFloat16), 5e-3);
}

TEST(Swiglu, LargeGatesStayFinite) {
  const auto gate = at::tensor({-1e4, -200.0, 200.0, 1e4}, at::kFloat);
  const auto out = ops::swiglu(gate, at::ones_like(gate));
  EXPECT_TRUE(at::equal(out, at::tensor({0.0, 0.0, 200.0, 1e4}, at::kFloat)));
}

TEST(Swiglu, ShapesThatDiffer) {
  EXPECT_THAT(message_of([] {
                ops::swiglu(at::zeros({2, 3}), at::zeros({2, 1}));
              }),
              ::testing::HasSubstr("expected [2 x 3], got [2 x 1]"));
  const auto integers = at::zeros({2, 3}, at::kInt);
  for (const auto kernel : {ops::Kernel::kReference, ops::Kernel::kFused}) {
    EXPECT_THAT(message_of([&] { ops::swiglu(integers, integers, kernel); }),
                ::testing::HasSubstr("swiglu: gate: expected floating-point numbers, got Int"));
  }
}

}  // namespace
}  // namespace longhaul::testing
