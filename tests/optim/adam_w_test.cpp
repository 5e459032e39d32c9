#include "longhaul/optim/adam_w.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "longhaul/base/error.h"

namespace longhaul::optim {
namespace {

TEST(AdamW, DecaysByPatternAndCountsStepsByParameter) {
  at::Tensor matrix = at::ones({2}, at::kDouble), norm = at::ones({2}, at::kDouble),
             frozen = at::ones({2}, at::kDouble);
  AdamW optimizer(
      {{"layers.0.mlp.weight", &matrix, nn::Init::kNormal},
       {"layers.0.input_layernorm.weight", &norm, nn::Init::kOnes},
       {"frozen.weight", &frozen, nn::Init::kNormal}},
      {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .no_decay = {"*layernorm*"}});
  matrix.mutable_grad() = at::full({2}, 0.5, at::kDouble);
  norm.mutable_grad() = at::full({2}, 0.5, at::kDouble);
  optimizer.step(0.01, 1.0);
  // The first step moves by lr, whatever the gradient's size.
  EXPECT_NEAR(matrix[0].item<double>(), 1 - 0.01 * 0.1 - 0.01, 1e-9);
  EXPECT_NEAR(norm[0].item<double>(), 1 - 0.01, 1e-9);
  EXPECT_EQ(frozen[0].item<double>(), 1.0);
  EXPECT_EQ(optimizer.state().count("frozen.weight"), 0u);

  norm.mutable_grad().reset();
  optimizer.step(0.01, 1.0);
  EXPECT_EQ(optimizer.state().at("layers.0.mlp.weight").step, 2);
  EXPECT_EQ(optimizer.state().at("layers.0.input_layernorm.weight").step, 1);
}

TEST(AdamW, APatternThatMatchesNothingIsRefused) {
  at::Tensor x = at::ones({2});
  const auto error_of = [&](const std::string& pattern) -> std::string {
    try {
      AdamW({{"embed.weight", &x, nn::Init::kNormal},
             {"layers.0.input_layernorm.weight", &x, nn::Init::kOnes},
             {"lm_head.weight", &x, nn::Init::kNormal}},
            {.no_decay = {"*layernorm*", pattern}});
    } catch (const UserError& error) {
      return error.what();
    }
    return "none";
  };
  const std::string names =
      "; there are names such as embed.weight, layers.0.input_layernorm.weight and lm_head.weight";
  EXPECT_EQ(error_of("embed.*"), "none");
  EXPECT_EQ(error_of("norm"),
            "'norm' matches the whole name of no parameter, did you mean '*norm*'?" + names);
  EXPECT_EQ(
      error_of("lm_haed.weight"),
      "'lm_haed.weight' matches the whole name of no parameter, did you mean 'lm_head.weight'?" +
          names);
  EXPECT_EQ(error_of("*bias"), "'*bias' matches the whole name of no parameter" + names);
}

TEST(AdamW, AForeignStateIsRefused) {
  at::Tensor x = at::ones({2});
  AdamW optimizer({{"x", &x, nn::Init::kNormal}}, {});
  EXPECT_THROW(optimizer.set_state({{"y", {at::ones({2}), at::ones({2}), 1}}}), UserError);
  EXPECT_THROW(optimizer.set_state({{"x", {at::ones({3}), at::ones({3}), 1}}}), UserError);
}

}  // namespace
}  // namespace longhaul::optim
