// The fused kernels of dense attention against the fp64 reference, forward and backward, for the
// instruction set that LONGHAUL_ISA names (ctest runs this once for each): absorbed and expanded,
// odd and extreme shapes, documents, and the same bits on any number of threads.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/flash_attention/flash_attention.h"
#include "tests/ops/fused_kernels.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;

// How keys and values are given: one row for all heads that is both, one of each, or rows by head.
enum class Form { kAbsorbed, kShared, kExpanded };
constexpr Form kForms[] = {Form::kAbsorbed, Form::kShared, Form::kExpanded};

struct Case {
  const char* name;
  std::vector<std::vector<int64_t>> documents;
  int64_t H, D, V;
};

const Case kCases[] = {
    {"one slot", {{1}}, 1, 32, 32},
    {"one head", {{9}}, 1, 64, 32},
    {"odd dims", {{37}, {37}}, 3, 27, 21},
    {"more than a group", {{33}}, 2, 96, 64},
    {"two blocks, 192/128", {{150}}, 2, 192, 128},
    {"values as wide as keys", {{70}}, 4, 64, 64},
    {"128 heads", {{6}}, 128, 64, 32},
    {"documents of length 1", {{1, 1, 4, 1, 60}}, 4, 64, 32},
    {"packed and padded", {{25, 24, -2}, {-3, 40, 8}}, 4, 96, 64},
    {"only padding", {{-4}}, 2, 32, 32},
    {"several blocks and documents", {{90, 210, 1, 99}}, 3, 64, 32},
};

Inputs operands(const Case& c, Form form, at::ScalarType dtype, double query_std = 1) {
  const auto starts = doc_start(c.documents);
  const int64_t B = starts.size(0), S = starts.size(1);
  Inputs all = {normal({B, S, c.H, c.D}, 1, query_std, dtype)};
  if (form == Form::kExpanded) {
    all.push_back(normal({B, S, c.H, c.D}, 2, 1, dtype));
    all.push_back(normal({B, S, c.H, c.V}, 3, 1, dtype));
  } else {
    all.push_back(normal({B, S, c.D}, 2, 1, dtype));
    if (form == Form::kShared) all.push_back(normal({B, S, c.V}, 3, 1, dtype));
  }
  return all;
}

ops::AttentionOptions options(const Case& c, Kernel kernel) {
  return {.scale = 0.3, .value_dim = c.V, .return_statistics = true, .kernel = kernel};
}

struct Evaluated2 {
  ops::AttentionResult result;
  Inputs gradients;
};

Evaluated2 attend(const Case& c, const Inputs& inputs, at::ScalarType type, Kernel kernel,
                  const at::Tensor& d_out) {
  Inputs leaves;
  for (const auto& x : inputs) leaves.push_back(x.to(type).detach().set_requires_grad(true));
  const auto value = leaves.size() > 2 ? leaves[2] : at::Tensor();
  const auto result =
      ops::flash_attention(leaves[0], leaves[1], value, doc_start(c.documents), options(c, kernel));
  return {result, torch::autograd::grad({(result.out_BSHV * d_out.to(type)).sum()}, leaves)};
}

// Relative, but by element of size 1 where less is expected: with one key in a row dS vanishes.
double frobenius(const at::Tensor& actual, const at::Tensor& expected) {
  const auto e = expected.to(at::kDouble), d = actual.to(at::kDouble) - e;
  const double scale = e.norm().item<double>(), error = d.norm().item<double>();
  return error / std::max(scale, std::sqrt(static_cast<double>(e.numel())));
}

class FusedDense : public FusedKernels<at::ScalarType> {
 protected:
  static at::ScalarType dtype() { return GetParam(); }
  // Operands are exact in both; what is left is fp32 accumulation, or bf16 rounding of P, dS and
  // results.
  static double limit() { return dtype() == at::kFloat ? 3e-6 : 6e-3; }

  static at::Tensor d_out(const Case& c) {
    const auto starts = doc_start(c.documents);
    return normal({starts.size(0), starts.size(1), c.H, c.V}, 8, 1, dtype());
  }
};

TEST_P(FusedDense, AttentionAndItsGradients) {
  for (const auto& c : kCases) {
    for (const Form form : kForms) {
      SCOPED_TRACE(::testing::Message() << c.name << ", form " << static_cast<int>(form));
      const auto in = operands(c, form, dtype());
      const auto expected = attend(c, in, at::kDouble, Kernel::kReference, d_out(c));
      const auto actual = attend(c, in, dtype(), Kernel::kFused, d_out(c));
      EXPECT_EQ(actual.result.out_BSHV.scalar_type(), dtype());
      EXPECT_LT(frobenius(actual.result.out_BSHV, expected.result.out_BSHV), limit());
      EXPECT_LT(frobenius(actual.result.softmax_max, expected.result.softmax_max), 2e-6);
      EXPECT_LT(frobenius(actual.result.softmax_sum, expected.result.softmax_sum), 3e-6);
      for (size_t i = 0; i < in.size(); ++i) {
        EXPECT_EQ(actual.gradients[i].sizes(), in[i].sizes());
        EXPECT_LT(frobenius(actual.gradients[i], expected.gradients[i]), limit()) << i;
      }
    }
  }
}

// Logits of thousands: one key takes all, and maxima move far.
TEST_P(FusedDense, LargeLogits) {
  const Case c{"", {{160, 9}}, 3, 64, 32};
  for (const Form form : kForms) {
    const auto in = operands(c, form, dtype(), 1000);
    const auto expected = attend(c, in, at::kDouble, Kernel::kReference, d_out(c));
    const auto actual = attend(c, in, dtype(), Kernel::kFused, d_out(c));
    // fp32 scores of 10^4 are off by 10^-3, which is the relative error of probabilities.
    EXPECT_LT(frobenius(actual.result.out_BSHV, expected.result.out_BSHV), 1e-2);
    for (const auto& gradient : actual.gradients) {
      EXPECT_TRUE(gradient.isfinite().all().item<bool>());
    }
  }
}

// A negative scale must not let invisible keys in.
TEST_P(FusedDense, NegativeScale) {
  const Case c{"", {{40, 30}}, 2, 64, 32};
  const auto in = operands(c, Form::kAbsorbed, dtype());
  const auto run = [&](at::ScalarType type, Kernel kernel) {
    Inputs leaves = {in[0].to(type).detach().set_requires_grad(true),
                     in[1].to(type).detach().set_requires_grad(true)};
    const auto result = ops::flash_attention(leaves[0], leaves[1], {}, doc_start(c.documents),
                                             {.scale = -0.2, .value_dim = c.V, .kernel = kernel});
    auto all = torch::autograd::grad({(result.out_BSHV * d_out(c).to(type)).sum()}, leaves);
    all.push_back(result.out_BSHV);
    return all;
  };
  const auto expected = run(at::kDouble, Kernel::kReference), actual = run(dtype(), Kernel::kFused);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LT(frobenius(actual[i], expected[i]), limit()) << i;
  }
}

// The sums of keys are shared among more blocks of queries than a superblock holds.
TEST_P(FusedDense, ThreadsDoNotChangeABit) {
  const Case c{"", {{700, 320}}, 9, 64, 32};
  const int before = at::get_num_threads();
  for (const Form form : kForms) {
    const auto in = operands(c, form, dtype());
    std::vector<at::Tensor> first;
    for (const int threads : {1, 2, 3}) {
      at::set_num_threads(threads);
      auto found = attend(c, in, dtype(), Kernel::kFused, d_out(c));
      std::vector<at::Tensor> all = found.gradients;
      all.push_back(found.result.out_BSHV);
      all.push_back(found.result.softmax_sum);
      if (first.empty()) first = all;
      for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(all[i], first[i])) << i;
    }
  }
  at::set_num_threads(before);
}

TEST_P(FusedDense, WrongShapesAreErrors) {
  const Case c{"", {{5}}, 2, 32, 32};
  const auto in = operands(c, Form::kExpanded, dtype());
  const auto message = [&](const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& starts) {
    return message_of(
        [&] { ops::flash_attention(in[0], key, value, starts, options(c, Kernel::kFused)); });
  };
  const auto starts = doc_start(c.documents);
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(message(in[1].narrow(2, 0, 1), in[2], starts),
                  "attention key: expected [1 x any x 2 x 32], got [1 x 5 x 1 x 32]"));
  EXPECT_TRUE(has(message(in[1], in[2].narrow(1, 0, 4), starts),
                  "attention value: expected [1 x 5 x 2 x any], got [1 x 4 x 2 x 32]"));
  EXPECT_TRUE(has(message(in[1], {}, starts), "attention without a value tensor: value_dim is 32"));
  EXPECT_TRUE(has(message(in[1], in[2], doc_start({{6}})),
                  "attention doc_start: expected [1 x 5], got [1 x 6]"));
  EXPECT_TRUE(has(message(in[1], in[2], starts - 1), "first_key and last_key must lie in"));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedDense, ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace longhaul::testing
