// The yardstick itself: it accepts a right gradient and catches a wrong one.
#include "tests/support/gradcheck.h"

#include <gtest/gtest.h>

namespace longhaul::testing {
namespace {

const Inputs kPoint = {normal({3, 4}, 1), normal({4}, 2)};

TEST(Gradcheck, AcceptsARightGradient) {
  const Function f = [](const Inputs& x) { return (x[0] * x[1]).sin(); };
  EXPECT_LT(gradient_error(f, kPoint), 1e-8);
}

TEST(Gradcheck, CatchesAWrongSign) {
  // The value is x y, the gradient of the detached part is lost: -x y in its place.
  const Function f = [](const Inputs& x) {
    const at::Tensor product = x[0] * x[1];
    return 2 * product.detach() - product;
  };
  EXPECT_GT(gradient_error(f, kPoint), 1.0);
}

TEST(Gradcheck, CatchesAnErrorOfOnePerMille) {
  const Function f = [](const Inputs& x) {
    const at::Tensor product = x[0] * x[1];
    return product + 1e-3 * (product - product.detach());
  };
  EXPECT_GT(gradient_error(f, kPoint), 5e-4);
}

TEST(Gradcheck, CatchesAMissingGradient) {
  const Function f = [](const Inputs& x) { return x[0].sin(); };
  EXPECT_EQ(gradient_error(f, kPoint), INFINITY);
}

TEST(Gradcheck, PrecisionErrorSeesTheDtype) {
  const Function f = [](const Inputs& x) { return x[0] * x[1]; };
  EXPECT_LT(precision_error(f, kPoint, at::kFloat), 1e-6);
  EXPECT_GT(precision_error(f, kPoint, at::kBFloat16), 1e-4);
}

}  // namespace
}  // namespace longhaul::testing
