#include "longhaul/ops/adam_w/adam_w.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "longhaul/base/error.h"
#include "tests/support/tensors.h"

namespace longhaul::testing {
namespace {

constexpr ops::AdamWOptions kOptions{
    .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_scale = 0.7};

struct State {
  at::Tensor param, exp_avg, exp_avg_sq;
};

State start(at::IntArrayRef sizes, at::ScalarType dtype) {
  return {normal(sizes, 1, 1.0, dtype), at::zeros(sizes, dtype), at::zeros(sizes, dtype)};
}

void update(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
            const at::Tensor& exp_avg_sq, int64_t step, const ops::AdamWOptions& options) {
  ops::adam_w({{param, grad, exp_avg, exp_avg_sq, step}}, options);
}

void update_by_definition(const at::Tensor& param, const at::Tensor& grad,
                          const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, int64_t step,
                          const ops::AdamWOptions& options) {
  ops::adam_w_reference({param, grad, exp_avg, exp_avg_sq, step}, options);
}

// One element, in plain doubles.
struct Scalar {
  double p, m = 0, v = 0;

  void step(double grad, int64_t n, const ops::AdamWOptions& o) {
    const double g = grad * o.grad_scale;
    p -= o.lr * o.weight_decay * p;
    m = o.beta1 * m + (1 - o.beta1) * g;
    v = o.beta2 * v + (1 - o.beta2) * g * g;
    const double m_hat = m / (1 - std::pow(o.beta1, n)), v_hat = v / (1 - std::pow(o.beta2, n));
    p -= o.lr * m_hat / (std::sqrt(v_hat) + o.eps);
  }
};

// Five steps; the largest distance of the parameter and the moments to plain doubles.
double distance_to_scalars(State& state, bool reference) {
  const at::Tensor first = state.param.to(at::kDouble).reshape(-1).clone();
  std::vector<Scalar> scalars;
  for (int64_t i = 0; i < first.numel(); ++i) scalars.push_back({first[i].item<double>()});
  for (int64_t n = 1; n <= 5; ++n) {
    const at::Tensor grad = normal(state.param.sizes(), 10 + n, 0.3).to(state.param.scalar_type());
    const at::Tensor flat = grad.to(at::kDouble).reshape(-1);
    const auto call = reference ? update_by_definition : update;
    call(state.param, grad, state.exp_avg, state.exp_avg_sq, n, kOptions);
    for (size_t i = 0; i < scalars.size(); ++i) {
      scalars[i].step(flat[static_cast<int64_t>(i)].item<double>(), n, kOptions);
    }
  }
  double worst = 0;
  for (size_t i = 0; i < scalars.size(); ++i) {
    const auto at = [&](const at::Tensor& x) {
      return x.reshape(-1)[static_cast<int64_t>(i)].item<double>();
    };
    worst = std::max({worst, std::abs(at(state.param) - scalars[i].p),
                      std::abs(at(state.exp_avg) - scalars[i].m),
                      std::abs(at(state.exp_avg_sq) - scalars[i].v)});
  }
  return worst;
}

TEST(AdamW, EqualsPlainDoubles) {
  for (const bool reference : {false, true}) {
    State wide = start({7, 5}, at::kDouble), narrow = start({7, 5}, at::kFloat);
    EXPECT_LT(distance_to_scalars(wide, reference), 1e-15);
    // Values of order 1 and five roundings each.
    EXPECT_LT(distance_to_scalars(narrow, reference), 2e-6);
  }
}

// Sizes around the vector width and beyond one parallel chunk; offsets that are not aligned.
TEST(AdamW, FastPathEqualsReference) {
  for (const int64_t size : {1, 3, 15, 16, 17, 33, 70001}) {
    at::Tensor storage = normal({4, size + 1}, 1, 1.0, at::kFloat);
    storage.slice(0, 2).abs_();
    at::Tensor p = storage[0].narrow(0, 1, size), grad = storage[1].narrow(0, 1, size),
               m = storage[2].narrow(0, 1, size), v = storage[3].narrow(0, 1, size);
    at::Tensor p2 = p.clone(), m2 = m.clone(), v2 = v.clone();
    update(p, grad, m, v, 3, kOptions);
    update_by_definition(p2, grad, m2, v2, 3, kOptions);
    EXPECT_LT((p - p2).abs().max().item<double>(), 1e-6) << size;
    EXPECT_LT((m - m2).abs().max().item<double>(), 1e-6) << size;
    EXPECT_LT((v - v2).abs().max().item<double>(), 1e-6) << size;
  }
}

TEST(AdamW, ThreadsDoNotChangeABit) {
  const auto run = [](int threads) {
    const int before = at::get_num_threads();
    at::set_num_threads(threads);
    State state = start({100003}, at::kFloat);
    for (int64_t n = 1; n <= 2; ++n) {
      update(state.param, normal({100003}, 5 + n, 1, at::kFloat), state.exp_avg, state.exp_avg_sq,
             n, kOptions);
    }
    at::set_num_threads(before);
    return state.param;
  };
  EXPECT_TRUE(at::equal(run(1), run(2)));
}

TEST(AdamW, OtherLayoutsAndDtypesTakeThePlainPath) {
  at::Tensor p = normal({4, 6}, 1).t(), grad = normal({6, 4}, 2), m = at::zeros_like(p),
             v = at::zeros_like(p);
  at::Tensor p2 = p.contiguous(), m2 = m.contiguous(), v2 = v.contiguous();
  update(p, grad, m, v, 1, kOptions);
  update(p2, grad, m2, v2, 1, kOptions);
  EXPECT_LT((p - p2).abs().max().item<double>(), 1e-15);

  at::Tensor bf16 = normal({9}, 1, 1, at::kBFloat16), fp32 = bf16.to(at::kFloat);
  at::Tensor bm = at::zeros({9}), bv = at::zeros({9}), fm = at::zeros({9}), fv = at::zeros({9});
  const at::Tensor g = normal({9}, 2, 1, at::kBFloat16);
  update(bf16, g, bm, bv, 1, kOptions);
  update(fp32, g.to(at::kFloat), fm, fv, 1, kOptions);
  EXPECT_LT((bf16.to(at::kFloat) - fp32).abs().max().item<double>(), 2e-2);
}

// An expert without tokens: a zero gradient still decays the weight and fades the moments.
TEST(AdamW, ZeroGradientDecaysAndFades) {
  at::Tensor p = at::ones({3}, at::kDouble), m = at::full({3}, 0.5, at::kDouble),
             v = at::full({3}, 0.25, at::kDouble);
  auto options = kOptions;
  options.eps = 1e-3;
  update(p, at::zeros_like(p), m, v, 2, options);
  EXPECT_NEAR(m[0].item<double>(), 0.45, 1e-15);
  EXPECT_NEAR(v[0].item<double>(), 0.2375, 1e-15);
  const double m_hat = 0.45 / (1 - 0.81), v_hat = 0.2375 / (1 - 0.9025);
  EXPECT_NEAR(p[0].item<double>(), 1 - 0.001 - 0.01 * m_hat / (std::sqrt(v_hat) + 1e-3), 1e-14);
}

TEST(AdamW, FirstStepFromZeroMomentsIsTheLearningRate) {
  at::Tensor p = at::zeros({2}, at::kDouble), m = at::zeros_like(p), v = at::zeros_like(p);
  update(p, at::tensor({3.0, -1e-3}, at::kDouble), m, v, 1, kOptions);
  EXPECT_NEAR(p[0].item<double>(), -0.01, 1e-8);
  EXPECT_NEAR(p[1].item<double>(), 0.01, 1e-6);
}

TEST(AdamW, EmptyAndMetaTensors) {
  State empty = start({0, 4}, at::kFloat);
  EXPECT_NO_THROW(
      update(empty.param, at::zeros({0, 4}), empty.exp_avg, empty.exp_avg_sq, 1, kOptions));
  at::Tensor p = at::zeros({3}, at::TensorOptions().device(at::kMeta)), m = p.clone(),
             v = p.clone();
  EXPECT_NO_THROW(update(p, p.clone(), m, v, 1, kOptions));
}

TEST(AdamW, BadInput) {
  State s = start({4}, at::kFloat);
  at::Tensor small = at::zeros({3});
  EXPECT_THAT(message_of([&] { update(s.param, small, s.exp_avg, s.exp_avg_sq, 1, kOptions); }),
              ::testing::HasSubstr("grad: expected [4], got [3]"));
  EXPECT_THAT(message_of([&] { update(s.param, s.param, small, s.exp_avg_sq, 1, kOptions); }),
              ::testing::HasSubstr("exp_avg: expected [4], got [3]"));
  EXPECT_THAT(message_of([&] { update(s.param, s.param, s.exp_avg, small, 1, kOptions); }),
              ::testing::HasSubstr("exp_avg_sq: expected [4], got [3]"));
  EXPECT_THAT(message_of([&] { update(s.param, s.param, s.exp_avg, s.exp_avg_sq, 0, kOptions); }),
              ::testing::HasSubstr("step: expected at least 1, got 0"));
  using Options = ops::AdamWOptions;
  const auto with = [&](double Options::*option, double value) {
    auto options = kOptions;
    options.*option = value;
    return message_of([&] { update(s.param, s.param, s.exp_avg, s.exp_avg_sq, 1, options); });
  };
  EXPECT_THAT(with(&Options::lr, -0.5), ::testing::HasSubstr("lr: expected at least 0, got -0.5"));
  EXPECT_THAT(with(&Options::eps, NAN), ::testing::HasSubstr("eps: expected at least 0, got nan"));
  EXPECT_THAT(with(&Options::beta2, 1),
              ::testing::HasSubstr("beta2: expected 0 to below 1, got 1"));
}

}  // namespace
}  // namespace longhaul::testing
