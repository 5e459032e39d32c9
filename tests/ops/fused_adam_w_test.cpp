// AdamW over many parameters at once, and the sum of squares of many tensors, for the instruction
// set that LONGHAUL_ISA names (ctest runs this once for each).
#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "longhaul/ops/adam_w/adam_w.h"
#include "longhaul/ops/sum_of_squares/sum_of_squares.h"
#include "tests/ops/fused_kernels.h"
#include "tests/support/tensors.h"

namespace longhaul::testing {
namespace {

constexpr ops::AdamWOptions kOptions{
    .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_scale = 0.7};

// Around the width of a vector and the elements that a thread takes at a time.
const std::vector<int64_t> kSizes = {1, 0, 3, 15, 16, 17, 0, 33, 16383, 16384, 16385, 70001, 5, 0};

using Updates = std::vector<ops::AdamWUpdate>;

// Every third parameter is not decayed; steps differ. Storage starts at any element.
Updates make_updates(at::ScalarType dtype = at::kFloat, double size = 1.0) {
  Updates updates;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    const int64_t n = kSizes[i];
    const at::Tensor storage = normal({4, n + 1}, i + 1, size, dtype);
    storage[3].abs_();
    const auto part = [&](int64_t row) { return storage[row].narrow(0, 1, n); };
    updates.push_back(
        {part(0), part(1), part(2), part(3), static_cast<int64_t>(1 + i * 7), i % 3 != 0});
  }
  return updates;
}

// The operations of the definition one after the other, each rounded to fp32 (this file is compiled
// without fused multiply-adds), and what is stored rounded to T.
template <typename T>
void update_by_hand(const ops::AdamWUpdate& u) {
  const auto& o = kOptions;
  const double correction1 = 1 - std::pow(o.beta1, u.step),
               correction2 = 1 - std::pow(o.beta2, u.step);
  const auto keep = static_cast<float>(1 - o.lr * (u.decays ? o.weight_decay : 0));
  const auto b1 = static_cast<float>(o.beta1), b2 = static_cast<float>(o.beta2);
  const auto rest1 = static_cast<float>(1 - o.beta1), rest2 = static_cast<float>(1 - o.beta2);
  const auto rate = static_cast<float>(o.lr / correction1);
  const auto inverse = static_cast<float>(1 / std::sqrt(correction2));
  const auto eps = static_cast<float>(o.eps);
  const auto wide = [](T x) { return static_cast<float>(x); };
  T *p = u.param.data_ptr<T>(), *m = u.exp_avg.data_ptr<T>(), *v = u.exp_avg_sq.data_ptr<T>();
  const T* grad = u.grad.const_data_ptr<T>();
  for (int64_t i = 0; i < u.param.numel(); ++i) {
    const float g = wide(grad[i]) * static_cast<float>(o.grad_scale);
    m[i] = static_cast<T>(b1 * wide(m[i]) + rest1 * g);
    v[i] = static_cast<T>(b2 * wide(v[i]) + rest2 * g * g);
    const float root = std::sqrt(wide(v[i])) * inverse;
    p[i] = static_cast<T>(wide(p[i]) * keep - rate * wide(m[i]) / (root + eps));
  }
}

void expect_same_bits(const Updates& actual, const Updates& expected) {
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::equal(actual[i].param, expected[i].param)) << i;
    EXPECT_TRUE(at::equal(actual[i].exp_avg, expected[i].exp_avg)) << i;
    EXPECT_TRUE(at::equal(actual[i].exp_avg_sq, expected[i].exp_avg_sq)) << i;
  }
}

class FusedOptimizer : public FusedKernels<int> {};

void update_on_threads(const Updates& updates, int threads) {
  const int before = at::get_num_threads();
  at::set_num_threads(threads);
  ops::adam_w(updates, kOptions);
  at::set_num_threads(before);
}

TEST_P(FusedOptimizer, AdamWRoundsEachOperationOnAnyThreads) {
  const Updates expected = make_updates(), actual = make_updates();
  for (const auto& update : expected) update_by_hand<float>(update);
  update_on_threads(actual, GetParam());
  expect_same_bits(actual, expected);
}

// Numbers of order 1, and such as bf16 has only as denormals.
TEST_P(FusedOptimizer, AdamWInBf16RoundsWhatItStores) {
  for (const double size : {1.0, 1e-39}) {
    const Updates expected = make_updates(at::kBFloat16, size),
                  actual = make_updates(at::kBFloat16, size);
    for (const auto& update : expected) update_by_hand<at::BFloat16>(update);
    update_on_threads(actual, GetParam());
    expect_same_bits(actual, expected);
    EXPECT_NE(actual[11].exp_avg.count_nonzero().item<int64_t>(), 0) << size;
    EXPECT_NE(actual[11].exp_avg_sq.count_nonzero().item<int64_t>(), 0) << size;
  }
}

ops::AdamWUpdate in_fp64(const ops::AdamWUpdate& u) {
  const auto wide = [](const at::Tensor& x) { return x.to(at::kDouble); };
  return {wide(u.param), wide(u.grad), wide(u.exp_avg), wide(u.exp_avg_sq), u.step, u.decays};
}

// Whether no element is further than that from the expected one.
bool is_within(const at::Tensor& actual, const at::Tensor& expected, const at::Tensor& distance) {
  return (actual.to(at::kDouble) - expected).abs().le(distance).all().item<bool>();
}

// A rounding to bf16 is 2^-9 of a number at most: one of each moment, and those of both moments'
// in what the parameter changes by, and its own. In fp32 a few roundings of terms that may cancel.
TEST_P(FusedOptimizer, AdamWInBf16AsTheDefinitionInFp64) {
  const Updates actual = make_updates(at::kBFloat16), narrow = make_updates(at::kBFloat16);
  ops::adam_w(actual, kOptions);
  for (size_t i = 0; i < actual.size(); ++i) {
    const ops::AdamWUpdate expected = in_fp64(narrow[i]);
    const at::Tensor before = expected.param.clone();
    ops::adam_w_reference(expected, kOptions);
    ops::adam_w_reference(narrow[i], kOptions);
    const auto& [p, grad, m, v, step, decays] = expected;
    const double rounding = std::ldexp(1.0, -8);
    EXPECT_TRUE(is_within(actual[i].exp_avg, m, m.abs() * rounding + 1e-6)) << i;
    EXPECT_TRUE(is_within(actual[i].exp_avg_sq, v, v * rounding + 1e-6)) << i;
    const at::Tensor change = (p - before).abs();
    EXPECT_TRUE(is_within(actual[i].param, p, (p.abs() + change) * rounding + 1e-4)) << i;
    // The definition in bf16 rounds after each operation.
    if (kSizes[i] < 10000) continue;
    const auto error = [&](const ops::AdamWUpdate& u) {
      return (u.param.to(at::kDouble) - p).abs().mean().item<double>();
    };
    EXPECT_LT(error(actual[i]), error(narrow[i])) << i;
  }
}

TEST_P(FusedOptimizer, AdamWAsTheDefinition) {
  const Updates actual = make_updates(), expected = make_updates();
  ops::adam_w(actual, kOptions);
  for (const auto& update : expected) ops::adam_w_reference(update, kOptions);
  for (size_t i = 0; i < actual.size(); ++i) {
    if (kSizes[i] == 0) continue;
    // Values of order 1, a handful of roundings in another order.
    EXPECT_LT((actual[i].param - expected[i].param).abs().max().item<double>(), 1e-6) << i;
    EXPECT_LT((actual[i].exp_avg_sq - expected[i].exp_avg_sq).abs().max().item<double>(), 1e-6)
        << i;
  }
}

// What the kernel does not take stands between what it takes: other dtypes and layouts. Both of its
// own dtypes go into one call.
TEST_P(FusedOptimizer, AdamWOfMixedParameters) {
  Updates actual = make_updates(), expected = make_updates();
  for (Updates* updates : {&actual, &expected}) {
    const auto make = [](uint64_t seed, at::ScalarType dtype) {
      return normal({4, 6}, seed, 1, dtype);
    };
    updates->insert(updates->begin() + 3, {make(1, at::kDouble), make(2, at::kDouble),
                                           make(3, at::kDouble), make(4, at::kDouble).abs(), 2});
    updates->insert(updates->begin() + 9,
                    {make(1, at::kFloat).t(), make(2, at::kFloat).t().contiguous(),
                     make(3, at::kFloat).t(), make(4, at::kFloat).abs().t(), 3});
    updates->push_back({make(1, at::kFloat), make(2, at::kFloat).t().contiguous().t(),
                        make(3, at::kFloat), make(4, at::kFloat).abs(), 4});
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {  // of the moments
      updates->insert(updates->begin() + 5, {make(5, at::kBFloat16), make(6, at::kBFloat16),
                                             make(7, dtype), make(8, dtype).abs(), 5});
    }
  }
  ops::adam_w(actual, kOptions);
  for (auto& update : expected) ops::adam_w({update}, kOptions);
  expect_same_bits(actual, expected);
}

TEST_P(FusedOptimizer, AdamWChecksBeforeItChanges) {
  Updates updates = make_updates();
  const at::Tensor before = updates[11].param.clone();
  updates[12].step = 0;
  EXPECT_THAT(message_of([&] { ops::adam_w(updates, kOptions); }),
              ::testing::HasSubstr("step: expected at least 1, got 0"));
  EXPECT_TRUE(at::equal(updates[11].param, before));
  EXPECT_NO_THROW(ops::adam_w({}, kOptions));
}

std::vector<at::Tensor> gradients() {
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < kSizes.size(); ++i) {
    const auto dtype = i % 2 == 0 ? at::kFloat : at::kBFloat16;
    all.push_back(normal({kSizes[i] + 1}, i + 1, 1.0 + double(i), dtype).narrow(0, 1, kSizes[i]));
  }
  all.push_back(normal({70, 30}, 99, 1, at::kFloat).t());
  all.push_back(normal({40}, 98));
  return all;
}

TEST_P(FusedOptimizer, SumOfSquares) {
  double expected = 0;
  for (const auto& x : gradients()) expected += x.to(at::kDouble).square().sum().item<double>();
  // Sums of 1e5 numbers in fp64; only the one fp64 tensor is rooted and squared again.
  EXPECT_NEAR(ops::sum_of_squares(gradients()), expected, 1e-12 * expected);
  // The definition takes norms in fp32.
  EXPECT_NEAR(ops::sum_of_squares_reference(gradients()), expected, 1e-5 * expected);
  EXPECT_EQ(ops::sum_of_squares({}), 0.0);
}

TEST_P(FusedOptimizer, SumOfSquaresIsTheSameOnAnyThreads) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const double expected = ops::sum_of_squares(gradients());
  at::set_num_threads(GetParam());
  EXPECT_EQ(ops::sum_of_squares(gradients()), expected);
  at::set_num_threads(before);
}

// Squares beyond fp32's range count, and what is not a number shows.
TEST_P(FusedOptimizer, SumOfSquaresOfExtremeValues) {
  EXPECT_NEAR(ops::sum_of_squares({at::full({100}, 1e30F)}), 1e62, 1e56);
  EXPECT_NEAR(ops::sum_of_squares({at::full({100}, 1e-30F)}), 1e-58, 1e-64);
  at::Tensor x = at::ones({40000});
  for (const int64_t place : {0, 20000, 39999}) {
    x[place] = NAN;
    EXPECT_TRUE(std::isnan(ops::sum_of_squares({at::ones({5}), x}))) << place;
    x[place] = -INFINITY;
    EXPECT_EQ(ops::sum_of_squares({x}), INFINITY) << place;
    x[place] = 1;
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, FusedOptimizer, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace longhaul::testing
