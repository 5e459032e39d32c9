// The fused kernels that move memory (rms_norm, rotary_mul, swiglu, moe_token_permute) against the
// fp64 reference, forward and backward, for the instruction set that LONGHAUL_ISA names (ctest runs
// this once for each): odd and extreme shapes, slices, and the same bits on any number of threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/ops/moe_token_permute/moe_token_permute.h"
#include "longhaul/ops/rms_norm/rms_norm.h"
#include "longhaul/ops/rotary_mul/rotary_mul.h"
#include "longhaul/ops/swiglu/swiglu.h"
#include "tests/ops/fused_operator.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;
using ops::RotaryMode;
using ::testing::HasSubstr;

constexpr double kEps = 1e-6;
constexpr int64_t kExperts = 5;

struct Angles {
  at::Tensor cos, sin;
};

Angles angles(int64_t B, int64_t S, int64_t R) {
  const auto angle = normal({B, S, R / 2}, 31, 3.0);
  return {angle.cos().to(at::kFloat), angle.sin().to(at::kFloat)};
}

const Operator kNorm = [](const Inputs& x, Kernel kernel) {
  return ops::rms_norm(x[0], x[1], kEps, kernel);
};
const Operator kSwiglu = [](const Inputs& x, Kernel kernel) {
  return ops::swiglu(x[0], x[1], kernel);
};

class FusedPointwise : public FusedOperator {};

// Rows around the width of a vector, of four vectors, and of many; more rows than blocks.
const std::vector<std::pair<int64_t, int64_t>> kShapes = {
    {1, 1},   {1, 7},    {3, 15}, {2, 16},   {5, 21},    {33, 64},
    {4, 129}, {3, 1027}, {0, 24}, {260, 40}, {2500, 17}, {130, 512}};

TEST_P(FusedPointwise, RmsNorm) {
  roundings_ = 3;  // of the normalised row, an fp32 weight and the result
  for (const auto& [rows, D] : kShapes) {
    const auto name = std::to_string(rows) + " x " + std::to_string(D);
    if (rows == 1 && D == 1) continue;  // x / |x|: the gradient is rounding (see below)
    expect_as_reference(kNorm, {normal({rows, D}, 1, 2.0), normal({D}, 2)}, name);
    expect_as_reference(kNorm, {normal({rows, D}, 1, 2.0), normal({D}, 2)}, name + ", fp32 weight",
                        /*fp32=*/1);
  }
}

TEST_P(FusedPointwise, RmsNormOfZerosAndLargeValues) {
  roundings_ = 2;
  const auto weight = normal({21}, 2);
  const auto zeros = evaluate([](const Inputs& x) { return kNorm(x, Kernel::kFused); },
                              {at::zeros({3, 21}, dtype()), weight.to(dtype())});
  EXPECT_EQ(zeros.value.abs().max().item<double>(), 0.0);
  EXPECT_TRUE(zeros.gradients[0].isfinite().all().item<bool>());
  EXPECT_EQ(zeros.gradients[1].abs().max().item<double>(), 0.0);
  for (const double size : {1e-12, 1e12, 1e17}) {
    const auto x = normal({4, 21}, 1, size);
    expect_as_reference(kNorm, {x, weight}, "of size " + std::to_string(size));
  }
  const auto one = evaluate([](const Inputs& x) { return kNorm(x, Kernel::kFused); },
                            {at::full({1, 1}, -3.0, dtype()), at::ones({1}, dtype())});
  EXPECT_NEAR(one.value.item<double>(), -1.0, 1e-6);
  EXPECT_NEAR(one.gradients[0].item<double>(), 0.0, 1e-6);
}

// The same roundings as in the reference: few elements lie so near a middle that fp32's order of
// summation decides.
TEST_P(FusedPointwise, RmsNormRoundsBeforeTheWeight) {
  const auto x = normal({64, 129}, 1, 1, at::kBFloat16), w = normal({129}, 2, 1, at::kFloat);
  const auto differs = ops::rms_norm(x, w, kEps, Kernel::kFused) != ops::rms_norm(x, w, kEps);
  EXPECT_LT(differs.sum().item<int64_t>(), 64 * 129 / 100);
}

// A NaN reaches the result, so that a loss shows it.
TEST_P(FusedPointwise, RmsNormOfNan) {
  auto x = normal({2, 40}, 1, 1, dtype());
  x[1][39] = NAN;
  const auto y = ops::rms_norm(x, at::ones({40}), kEps, Kernel::kFused);
  EXPECT_TRUE(y[0].isfinite().all().item<bool>());
  EXPECT_TRUE(y[1].isnan().all().item<bool>());
}

// The first columns of wider rows, the rows of a transposed tensor, and one row for all.
TEST_P(FusedPointwise, RmsNormOfSlices) {
  roundings_ = 2;
  const auto weight = normal({24}, 2);
  const Operator narrow = [](const Inputs& x, Kernel kernel) {
    return ops::rms_norm(x[0].narrow(-1, 3, 24), x[1], kEps, kernel).narrow(-1, 1, 22);
  };
  expect_as_reference(narrow, {normal({2, 5, 40}, 1), weight}, "narrow");
  const Operator transposed = [](const Inputs& x, Kernel kernel) {
    return ops::rms_norm(x[0].transpose(0, 2), x[1], kEps, kernel).transpose(0, 1);
  };
  expect_as_reference(transposed, {normal({24, 5, 3}, 1), weight}, "transposed");
  const Operator expanded = [](const Inputs& x, Kernel kernel) {
    return ops::rms_norm(x[0].expand({7, 24}), x[1], kEps, kernel);
  };
  expect_as_reference(expanded, {normal({1, 24}, 1), weight}, "expanded");
}

TEST_P(FusedPointwise, RotaryMul) {
  const std::vector<std::vector<int64_t>> shapes = {{1, 1, 1, 2},   {2, 3, 6},     {2, 5, 3, 14},
                                                    {1, 7, 2, 32},  {2, 9, 4, 64}, {1, 3, 1, 70},
                                                    {1, 40, 3, 42}, {2, 0, 3, 8},  {1, 300, 8, 64}};
  for (const auto mode : {RotaryMode::kInterleaved, RotaryMode::kHalfSplit}) {
    for (const auto& sizes : shapes) {
      const auto [cos, sin] = angles(sizes[0], sizes[1], sizes.back());
      const Operator f = [&, c = cos, s = sin](const Inputs& x, Kernel kernel) {
        const auto type = kernel == Kernel::kReference ? at::kDouble : at::kFloat;
        return ops::rotary_mul(x[0], c.to(type), s.to(type), mode, kernel);
      };
      expect_as_reference(f, {normal(sizes, 1)}, std::to_string(sizes.back()));
    }
  }
}

// The rope part of the queries, between other columns and heads.
TEST_P(FusedPointwise, RotaryMulOfSlices) {
  const auto [cos, sin] = angles(2, 5, 38);
  for (const auto mode : {RotaryMode::kInterleaved, RotaryMode::kHalfSplit}) {
    const Operator f = [&, c = cos, s = sin](const Inputs& x, Kernel kernel) {
      const auto part = x[0].narrow(2, 1, 3).narrow(3, 5, 38);
      const auto type = kernel == Kernel::kReference ? at::kDouble : at::kFloat;
      const auto y = ops::rotary_mul(part, c.to(type), s.to(type), mode, kernel);
      return at::cat({y, x[0].narrow(2, 1, 3).narrow(3, 0, 5)}, -1);
    };
    expect_as_reference(f, {normal({2, 5, 4, 45}, 1)}, "slice");
  }
}

TEST_P(FusedPointwise, Swiglu) {
  for (const int64_t n : {0, 1, 7, 16, 1027, 4096, 4097, 40003}) {
    expect_as_reference(kSwiglu, {normal({n}, 1, 3.0), normal({n}, 2)}, std::to_string(n));
  }
  expect_as_reference(
      [](const Inputs& x, Kernel kernel) {
        return ops::swiglu(x[0].transpose(0, 1), x[1].narrow(1, 2, 21), kernel);
      },
      {normal({21, 6}, 1), normal({6, 30}, 2)}, "slices");
}

// The same bits from halves of wider rows, into halves of wider rows.
TEST_P(FusedPointwise, SwigluOfHalves) {
  for (const auto& [rows, D] : kShapes) {
    const auto x = normal({rows, 2 * D}, 1, 3.0).to(dtype());
    const auto gate = x.narrow(1, 0, D), up = x.narrow(1, D, D);
    const auto dy = normal({rows, D}, 2).to(dtype());
    const auto expected = [&] {
      const Inputs leaves = {gate.contiguous().set_requires_grad(true),
                             up.contiguous().set_requires_grad(true)};
      const auto y = kSwiglu(leaves, Kernel::kFused);
      auto all = torch::autograd::grad({y}, leaves, {dy});
      all.push_back(y);
      return all;
    }();
    const auto d_x = at::full_like(x, NAN);
    ops::swiglu_rows_grad(dy, gate, up, d_x.narrow(1, 0, D), d_x.narrow(1, D, D));
    EXPECT_TRUE(at::equal(ops::swiglu_rows(gate, up), expected[2])) << rows << " x " << D;
    EXPECT_TRUE(at::equal(d_x, at::cat({expected[0], expected[1]}, 1))) << rows << " x " << D;
  }
}

TEST_P(FusedPointwise, SwigluOfLargeValues) {
  const auto gate = at::tensor({-1e30, -1e4, -200., -90., -20., -1e-30, 0., 1e-30, 20., 90., 1e30});
  expect_as_reference(
      [](const Inputs& x, Kernel kernel) {
        return kSwiglu({x[0] * 1, x[1]}, kernel);
      },
      {gate.clamp(-1e4, 1e4), at::ones_like(gate)}, "to 1e4");
  const auto result = evaluate([](const Inputs& x) { return kSwiglu(x, Kernel::kFused); },
                               {gate.to(dtype()), at::ones_like(gate).to(dtype())});
  EXPECT_TRUE(result.value.isfinite().all().item<bool>());
  for (const auto& d : result.gradients) EXPECT_TRUE(d.isfinite().all().item<bool>());
  const auto nan = ops::swiglu(at::full({3}, NAN, dtype()), at::ones({3}, dtype()), Kernel::kFused);
  EXPECT_TRUE(nan.isnan().all().item<bool>());
}

struct Choice {
  const char* name;
  at::Tensor experts_TK;
};

std::vector<Choice> choices() {
  return {
      {"random", integers({37, 3}, kExperts, 1)},
      {"some nowhere", integers({37, 3}, kExperts + 1, 2)},
      {"two experts empty", integers({50, 8}, kExperts - 2, 3)},
      {"all to one", at::full({9, 2}, 2, at::kLong)},
      {"all nowhere", at::full({9, 2}, kExperts, at::kLong)},
      {"one token, one choice", at::full({1, 1}, 3, at::kLong)},
      {"no token", at::zeros({0, 2}, at::kLong)},
      {"five choices", at::arange(15).reshape({3, 5}).remainder(kExperts)},
      {"seven choices", at::arange(14).reshape({2, 7}).remainder(kExperts)},
  };
}

TEST_P(FusedPointwise, PermuteAndUnpermute) {
  for (const auto& [name, experts] : choices()) {
    const int64_t T = experts.size(0), k = experts.size(1);
    const auto order = ops::sort_by_expert(experts, kExperts);
    const Operator permute = [&](const Inputs& x, Kernel kernel) {
      return ops::moe_token_permute(x[0], order, kernel);
    };
    const Operator unpermute = [&](const Inputs& x, Kernel kernel) {
      return ops::moe_token_unpermute(x[0], x[1], order, kernel);
    };
    for (const int64_t D : {1, 7, 21, 64, 1027, 2049, 4100}) {
      if (D > 2048 && T * k > 20) continue;  // takes long
      const auto what = std::string(name) + ", D = " + std::to_string(D);
      expect_as_reference(permute, {normal({T, D}, 1)}, what);
      expect_as_reference(unpermute, {normal({T * k, D}, 1), normal({T, k}, 2)}, what,
                          /*fp32=*/1);
    }
  }
}

// A copy is a copy: infinities, NaN, denormals, negative zero.
TEST_P(FusedPointwise, PermuteKeepsEveryBit) {
  const auto order = ops::sort_by_expert(integers({4, 2}, kExperts, 1), kExperts);
  const auto x =
      at::tensor({INFINITY, NAN, 1e-40F, -0.0F}).to(dtype()).view({4, 1}).repeat({1, 35});
  const auto actual = ops::moe_token_permute(x, order, Kernel::kFused);
  const auto expected = ops::moe_token_permute(x, order);
  const auto bits = dtype() == at::kFloat ? at::kInt : at::kShort;
  EXPECT_TRUE(at::equal(actual.view(bits), expected.view(bits)));
}

// Results beyond the size from which they are written past the caches are those of smaller pieces.
// A row is some blocks of those that are written at once and a part of one.
TEST_P(FusedPointwise, LargeResults) {
  constexpr int64_t kRows = 8400, kPiece = 1200, D = 1088;
  const auto x = normal({kRows, D}, 1, 1, dtype()), y = normal({kRows, D}, 2, 1, dtype());
  const auto expect_pieces = [&](const std::function<at::Tensor(const at::Tensor&, int64_t)>& f) {
    const auto run = [&](int64_t from, int64_t rows) {
      const auto leaf = x.narrow(0, from, rows).detach().set_requires_grad(true);
      const auto out = f(leaf, from);
      const auto d_out = y.narrow(0, from, rows).view(out.sizes());
      return Inputs{out.detach(), torch::autograd::grad({out}, {leaf}, {d_out})[0]};
    };
    const auto all = run(0, kRows);
    for (int64_t from = 0; from < kRows; from += kPiece) {
      const auto piece = run(from, kPiece);
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(
            at::equal(all[i].view({kRows, D}).narrow(0, from, kPiece), piece[i].view({kPiece, D})))
            << i << " from row " << from;
      }
    }
  };
  expect_pieces(
      [&](const at::Tensor& in, int64_t) { return ops::rms_norm(in, y[0], kEps, Kernel::kFused); });
  expect_pieces([&](const at::Tensor& in, int64_t from) {
    const auto residual = y.narrow(0, from, in.size(0));
    const auto [normed, sum] = ops::rms_norm_add(in, residual, y[0], kEps, Kernel::kFused);
    return normed + sum;
  });
  expect_pieces([&](const at::Tensor& in, int64_t from) {
    return ops::swiglu(in, y.narrow(0, from, in.size(0)), Kernel::kFused);
  });
  for (const int64_t R : {int64_t{64}, D}) {
    const auto [cos, sin] = angles(1, kRows, R);
    for (const auto mode : {RotaryMode::kInterleaved, RotaryMode::kHalfSplit}) {
      expect_pieces([&, c = cos, s = sin](const at::Tensor& in, int64_t from) {
        const int64_t rows = in.size(0);
        return ops::rotary_mul(in.view({1, rows, D / R, R}), c.narrow(1, from, rows),
                               s.narrow(1, from, rows), mode, Kernel::kFused);
      });
    }
  }
}

TEST_P(FusedPointwise, LargePermutation) {
  constexpr int64_t kTokens = 8400, D = 1088;
  const auto x = normal({kTokens, D}, 1, 1, dtype());
  const auto probs = normal({kTokens, 2}, 3, 1, at::kFloat);
  const auto order = ops::sort_by_expert(integers({kTokens, 2}, kExperts, 1), kExperts);
  const auto run = [&](Kernel kernel) {
    const Inputs leaves = {x.detach().set_requires_grad(true),
                           probs.detach().set_requires_grad(true)};
    const auto rows = ops::moe_token_permute(leaves[0], order, kernel);
    const auto out = ops::moe_token_unpermute(rows, leaves[1], order, kernel);
    const auto gradients = torch::autograd::grad({out}, leaves, {x});
    return Inputs{rows.detach(), out.detach(), gradients[0], gradients[1]};
  };
  const auto expected = run(Kernel::kReference), actual = run(Kernel::kFused);
  EXPECT_TRUE(at::equal(actual[0], expected[0]));
  // bf16: one of them may round the other way where their sums lie around a middle.
  for (size_t i = 1; i < 4; ++i) EXPECT_LT(error(actual[i], expected[i]), 2 * limit()) << i;
}

TEST_P(FusedPointwise, ThreadsDoNotChangeABit) {
  const auto x = normal({700, 129}, 1, 1, dtype()), y = normal({700, 129}, 2, 1, dtype());
  expect_same_on_any_threads(kNorm, {x, normal({129}, 2, 1, at::kFloat)});
  expect_same_on_any_threads(kSwiglu, {x, y});
  const auto [cos, sin] = angles(1, 700, 42);
  for (const auto mode : {RotaryMode::kInterleaved, RotaryMode::kHalfSplit}) {
    expect_same_on_any_threads(
        [&, c = cos, s = sin](const Inputs& in, Kernel kernel) {
          return ops::rotary_mul(in[0].narrow(-1, 2, 42), c, s, mode, kernel);
        },
        {x.view({1, 700, 129})});
  }
  const auto order = ops::sort_by_expert(integers({700, 3}, kExperts + 1, 1), kExperts);
  expect_same_on_any_threads(
      [&](const Inputs& in, Kernel kernel) {
        const auto rows = ops::moe_token_permute(in[0], order, kernel);
        return ops::moe_token_unpermute(rows, in[1], order, kernel);
      },
      {x, normal({700, 3}, 3, 1, at::kFloat)});
}

TEST_P(FusedPointwise, MetaTensorsHaveTheSizes) {
  const auto x = normal({6, 14}, 1, 1, dtype());
  expect_meta_sizes(kNorm, {x, normal({14}, 2, 1, at::kFloat)});
  expect_meta_sizes(kSwiglu, {x, x});
  const auto [cos, sin] = angles(2, 3, 14);
  expect_meta_sizes(
      [&, c = cos, s = sin](const Inputs& in, Kernel kernel) {
        return ops::rotary_mul(in[0], c, s, RotaryMode::kInterleaved, kernel);
      },
      {x.view({2, 3, 14})});
  const auto order = ops::sort_by_expert(integers({6, 2}, kExperts, 1), kExperts);
  expect_meta_sizes(
      [&](const Inputs& in, Kernel kernel) {
        const auto rows = ops::moe_token_permute(in[0], order, kernel);
        return ops::moe_token_unpermute(rows, in[1], order, kernel);
      },
      {x, normal({6, 2}, 3, 1, at::kFloat)});
}

TEST_P(FusedPointwise, OtherDtypesTakeTheReference) {
  const auto x = normal({3, 8}, 1), w = normal({8}, 2);
  EXPECT_TRUE(at::equal(ops::rms_norm(x, w, kEps, Kernel::kFused), ops::rms_norm(x, w, kEps)));
  EXPECT_TRUE(at::equal(ops::swiglu(x, x, Kernel::kFused), ops::swiglu(x, x)));
}

TEST_P(FusedPointwise, ShapesThatDoNotFit) {
  const auto zeros = [](at::IntArrayRef sizes) { return at::zeros(sizes, dtype()); };
  const auto expect = [](const std::function<void()>& f, const char* part) {
    EXPECT_THAT(message_of(f), HasSubstr(part));
  };
  expect(
      [&] {
        ops::rms_norm(zeros({2, 3}), zeros({4}), kEps, Kernel::kFused);
      },
      "rms_norm: weight: expected [3], got [4]");
  expect(
      [&] {
        ops::swiglu(zeros({2, 3}), zeros({2, 1}), Kernel::kFused);
      },
      "swiglu: up: expected [2 x 3], got [2 x 1]");
  const auto turn = [&](at::IntArrayRef sizes) {
    const auto angle = at::zeros({2, 5, 3});
    ops::rotary_mul(zeros(sizes), angle, angle, RotaryMode::kHalfSplit, Kernel::kFused);
  };
  expect([&] { turn({2, 5, 1, 8}); }, "rotary_mul: cos: expected [2 x 5 x 4], got [2 x 5 x 3]");
  expect(
      [&] {
        turn({2, 5, 7});
      },
      "rotary_mul: pairs of x [2 x 5 x 7]: expected 3 dimensions or more, the last one even");
  auto order = ops::sort_by_expert(integers({9, 2}, kExperts, 1), kExperts);
  expect(
      [&] {
        ops::moe_token_permute(zeros({8, 3}), order, Kernel::kFused);
      },
      "permute: tokens: expected [9 x any], got [8 x 3]");
  expect(
      [&] {
        ops::moe_token_unpermute(zeros({17, 3}), zeros({9, 2}), order, Kernel::kFused);
      },
      "unpermute: rows: expected [18 x any], got [17 x 3]");
  expect(
      [&] {
        ops::moe_token_unpermute(zeros({18, 3}), zeros({9, 1}), order, Kernel::kFused);
      },
      "unpermute: probs: expected [9 x 2], got [9 x 1]");
  order.inverse = at::full({9, 2}, 18, at::kLong);
  expect(
      [&] {
        ops::moe_token_permute(zeros({9, 3}), order, Kernel::kFused);
      },
      "moe_token_permute: inverse: expected 0 to");
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedPointwise, ::testing::Values(at::kFloat, at::kBFloat16));

}  // namespace
}  // namespace longhaul::testing
