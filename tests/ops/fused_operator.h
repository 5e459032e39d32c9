// What the tests of fused operators share: value and gradients against the fp64 reference at
// operands that are exact in both, the same bits on any number of threads, sizes on the Meta
// device.
#pragma once

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>

#include "longhaul/ops/kernel.h"
#include "tests/ops/fused_kernels.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {

// Of operands and a kernel, so that one text serves the reference in fp64 and the fused kernel.
using Operator = std::function<at::Tensor(const Inputs&, ops::Kernel)>;

class FusedOperator : public FusedKernels<at::ScalarType> {
 protected:
  static at::ScalarType dtype() { return GetParam(); }
  // Operands are exact in both; bf16 rounds each result, 2^-8 at most.
  double limit() const { return dtype() == at::kFloat ? 3e-6 : roundings_ * 3.91e-3; }
  int roundings_ = 1;
  virtual at::ScalarType value_dtype() const { return dtype(); }

  // Value and gradients at operands that are rounded to the dtype; `fp32` is the first operand that
  // stays fp32.
  void expect_as_reference(const Operator& f, const Inputs& operands, const std::string& what,
                           size_t fp32 = 9) {
    Inputs narrow, wide;
    for (size_t i = 0; i < operands.size(); ++i) {
      narrow.push_back(operands[i].to(i >= fp32 ? at::kFloat : dtype()));
      wide.push_back(narrow[i].to(at::kDouble));
    }
    const auto expected = evaluated(f, wide, ops::Kernel::kReference);
    const auto actual = evaluated(f, narrow, ops::Kernel::kFused);
    EXPECT_EQ(actual.value.scalar_type(), value_dtype()) << what;
    EXPECT_LT(error(actual.value, expected.value), limit()) << what;
    for (size_t i = 0; i < operands.size(); ++i) {
      ASSERT_TRUE(actual.gradients[i].defined()) << what << ", gradient " << i;
      EXPECT_EQ(actual.gradients[i].scalar_type(), narrow[i].scalar_type()) << what;
      EXPECT_LT(error(actual.gradients[i], expected.gradients[i]), limit())
          << what << ", gradient " << i;
    }
  }

  // The value, and the gradients for a result's gradient that is exact in the dtype.
  static Evaluated evaluated(const Operator& f, const Inputs& operands, ops::Kernel kernel) {
    Inputs leaves;
    for (const auto& x : operands) leaves.push_back(x.detach().set_requires_grad(true));
    const auto out = f(leaves, kernel);
    const auto d_out = normal(out.sizes(), 4711).to(dtype()).to(out.scalar_type());
    return {out.detach(), torch::autograd::grad({out}, leaves, {d_out})};
  }

  // The largest difference as a share of the largest element: every element counts.
  static double error(const at::Tensor& actual, const at::Tensor& expected) {
    EXPECT_EQ(actual.sizes(), expected.sizes());
    if (actual.numel() == 0) return 0;
    const auto e = expected.to(at::kDouble);
    const double largest = e.abs().max().item<double>();
    const double difference = (actual.to(at::kDouble) - e).abs().max().item<double>();
    return difference / (largest > 0 ? largest : 1);
  }

  // Bitwise the same value and gradients on these numbers of threads.
  static void expect_same_on_any_threads(const Operator& f, const Inputs& operands,
                                         const std::vector<int>& numbers = {1, 2, 3}) {
    const int before = at::get_num_threads();
    std::vector<at::Tensor> first;
    for (const int threads : numbers) {
      at::set_num_threads(threads);
      auto result = evaluate([&](const Inputs& x) { return f(x, ops::Kernel::kFused); }, operands);
      result.gradients.push_back(result.value);
      if (first.empty()) first = result.gradients;
      for (size_t i = 0; i < first.size(); ++i) {
        EXPECT_TRUE(at::equal(result.gradients[i], first[i])) << i << " on " << threads;
      }
    }
    at::set_num_threads(before);
  }

  static void expect_meta_sizes(const Operator& f, Inputs operands) {
    Inputs leaves;
    for (auto& x : operands) {
      const bool floats = at::isFloatingType(x.scalar_type());
      leaves.push_back(x.to(at::kMeta).set_requires_grad(floats));
    }
    const auto out = f(leaves, ops::Kernel::kFused);
    EXPECT_EQ(out.sizes(), f(operands, ops::Kernel::kReference).sizes());
    const auto gradients = torch::autograd::grad({out.sum()}, leaves);
    for (size_t i = 0; i < leaves.size(); ++i) {
      EXPECT_EQ(gradients[i].sizes(), operands[i].sizes());
      EXPECT_EQ(gradients[i].scalar_type(), operands[i].scalar_type());
    }
  }
};

}  // namespace longhaul::testing
