#include "longhaul/nn/auxiliary_loss.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

TEST(AttachLoss, AddsItsGradientWhateverHappensToTheOutput) {
  at::Tensor x = normal({3}, 1).set_requires_grad(true), w = normal({3}, 2).set_requires_grad(true);
  const auto y = nn::attach_loss(x * 2, (w * w).sum());
  EXPECT_TRUE(at::equal(y, x * 2));
  torch::autograd::backward({y.sum() * 0.125}, {});
  EXPECT_TRUE(at::equal(x.grad(), at::full({3}, 0.25, at::kDouble)));
  EXPECT_TRUE(at::equal(w.grad(), 2 * w.detach())) << "not scaled by what came after";
}

TEST(AttachLoss, OnAFrozenTrunkIsDifferentiatedAtOnce) {
  const at::Tensor x = normal({3}, 1);
  at::Tensor w = normal({3}, 2).set_requires_grad(true);
  const auto y = nn::attach_loss(x, (w * w).sum());
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(at::equal(w.grad(), 2 * w.detach()));
}

TEST(AttachLoss, WithoutGradientDoesNothing) {
  at::Tensor x = normal({3}, 1).set_requires_grad(true);
  const auto y = nn::attach_loss(x, at::ones({}, at::kDouble));
  torch::autograd::backward({y.sum()}, {});
  EXPECT_TRUE(at::equal(x.grad(), at::ones({3}, at::kDouble)));
}

TEST(AttachLoss, SeveralTravelOnOneTensor) {
  at::Tensor x = normal({3}, 1).set_requires_grad(true), a = normal({3}, 2).set_requires_grad(true),
             b = normal({3}, 3).set_requires_grad(true);
  const auto y = nn::attach_loss(nn::attach_loss(x, a.sum()), b.sum() * 3);
  torch::autograd::backward({y.sum()}, {});
  EXPECT_TRUE(at::equal(a.grad(), at::ones({3}, at::kDouble)));
  EXPECT_TRUE(at::equal(b.grad(), at::full({3}, 3.0, at::kDouble)));
}

}  // namespace
}  // namespace longhaul::testing
