// Parts that are computed again: the same gradients, whatever is saved; saved operators run once.
#include "longhaul/nn/recompute.h"

#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/ops/matmul/matmul.h"
#include "tests/support/gradcheck.h"
#include "tests/support/observed_calls.h"

namespace longhaul::testing {
namespace {

using ::testing::HasSubstr;

const ops::SavePolicy kSaveProducts = {.operators = {"linear"}};

// Three products with tanh between them, and their leaves: the input and the weights.
class Recompute : public ::testing::Test {
 protected:
  Recompute() {
    const std::vector<std::vector<int64_t>> sizes = {{5, 4}, {6, 4}, {7, 6}, {3, 7}};
    for (size_t i = 0; i < sizes.size(); ++i) {
      leaves_.push_back(normal(sizes[i], i + 1, 0.5, at::kFloat).set_requires_grad(true));
    }
  }

  at::Tensor part(const at::Tensor& x) const {
    const auto first = at::tanh(ops::linear(x, leaves_[1]));
    return at::tanh(ops::linear(at::tanh(ops::linear(first, leaves_[2])), leaves_[3]));
  }
  at::Tensor recomputed(const ops::SavePolicy& saves) const {
    return nn::recompute([this](const auto& x, bool) { return part(x[0]); }, {leaves_[0]}, saves);
  }
  std::vector<at::Tensor> gradients(const at::Tensor& y) {
    torch::autograd::backward({y.sum()}, {}, /*retain_graph=*/true);
    std::vector<at::Tensor> result;
    for (auto& leaf : leaves_) {
      result.push_back(leaf.grad());
      leaf.mutable_grad() = at::Tensor();
    }
    return result;
  }
  void expect_equal(const std::vector<at::Tensor>& actual,
                    const std::vector<at::Tensor>& expected) {
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(actual[i], expected[i])) << "leaf " << i;
    }
  }
  // Products that the backward pass runs.
  int64_t products_of_backward(const at::Tensor& y) {
    const OperatorCalls calls;
    gradients(y);
    return calls.products();
  }

  std::vector<at::Tensor> leaves_;
};

TEST_F(Recompute, HasTheSameGradientsWhateverIsSaved) {
  const auto expected = gradients(part(leaves_[0]));
  for (const auto& saves : {ops::SavePolicy{}, kSaveProducts, ops::SavePolicy{{"all_to_all"}},
                            ops::SavePolicy{{"linear"}, {{6, 4}}}}) {
    const auto y = recomputed(saves);
    EXPECT_TRUE(at::equal(y, part(leaves_[0])));
    expect_equal(gradients(y), expected);
    expect_equal(gradients(y), expected);  // nothing is saved any more, all is computed
  }
}

// Of the products the first and the third are saved; without the first weight, only the second.
TEST_F(Recompute, SavedOperatorsAreNotRunAgain) {
  const int64_t kept = products_of_backward(part(leaves_[0]));
  const auto again = [&](const ops::SavePolicy& saves) {
    return products_of_backward(recomputed(saves)) - kept;
  };
  EXPECT_GT(kept, 0);
  EXPECT_EQ(again({}), 3);
  EXPECT_EQ(again({{"linear_by_head"}}), 3);
  EXPECT_EQ(again(kSaveProducts), 1);
  EXPECT_EQ(again({{"linear"}, {{6, 4}}}), 2);
  EXPECT_EQ(again({{"linear"}, {{6, 4}, {7, 6}, {3, 7}}}), 3);
}

// Between the passes there is what is saved, and after the recomputation no more of it.
TEST_F(Recompute, WhatIsSavedIsThereUntilItIsTaken) {
  const auto live = [&](const ops::SavePolicy& saves) {
    const LiveBytes bytes;
    const auto y = recomputed(saves);
    const int64_t between = bytes.now();
    gradients(y);
    return std::pair{between, bytes.now()};
  };
  const auto [none, none_after] = live({});
  const auto [some, some_after] = live(kSaveProducts);
  // The first product [5, 6] and the third [5, 3], fp32; an allocation is rounded up.
  EXPECT_GE(some - none, (5 * 6 + 5 * 3) * 4);
  EXPECT_LT(some - none, (5 * 6 + 5 * 3 + 5 * 7) * 4 + 128);
  EXPECT_EQ(some_after, none_after);
}

TEST_F(Recompute, OperatorsWithinAPartOfTheirOwnDecide) {
  const auto expected = gradients(at::tanh(ops::linear(part(leaves_[0]), at::eye(3))));
  const auto nested = nn::recompute(
      [this](const auto& x, bool) {
        const auto inner =
            nn::recompute([this](const auto& y, bool) { return part(y[0]); }, {x[0]}, {});
        return at::tanh(ops::linear(inner, at::eye(3)));
      },
      {leaves_[0]}, kSaveProducts);
  expect_equal(gradients(nested), expected);
}

TEST_F(Recompute, AResultThatIsWrittenToIsAnError) {
  const auto y =
      nn::recompute([this](const auto& x, bool) { return ops::linear(x[0], leaves_[1]).add_(1); },
                    {leaves_[0]}, kSaveProducts);
  EXPECT_THAT(message_of([&] { gradients(y); }),
              HasSubstr("a saved result of linear was written to after the forward pass"));
}

TEST_F(Recompute, OtherCallsThanBeforeAreAnError) {
  const auto other = [this](const auto& x, bool again) {
    const auto y = ops::linear(x[0], leaves_[1]);
    if (!again) return y;
    return ops::linear_by_head(y.view({1, 5, 1, 6}), at::ones({1, 6, 6})).view({5, 6});
  };
  const auto more = nn::recompute(other, {leaves_[0]}, kSaveProducts);
  EXPECT_THAT(message_of([&] { gradients(more); }),
              HasSubstr("the recomputation calls linear_by_head where the forward pass had ended"));
  const auto swapped = nn::recompute(
      [&](const auto& x, bool again) {
        return again
                   ? ops::linear_by_head(x[0].view({1, 5, 1, 4}), at::ones({1, 4, 6})).view({5, 6})
                   : ops::linear(x[0], leaves_[1]);
      },
      {leaves_[0]}, kSaveProducts);
  EXPECT_THAT(message_of([&] { gradients(swapped); }),
              HasSubstr("the recomputation calls linear_by_head where the forward pass called "
                        "linear"));
}

}  // namespace
}  // namespace longhaul::testing
