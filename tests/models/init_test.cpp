// Initial weights of a model: a function of seed, name and element alone.
#include <gmock/gmock.h>

#include <cmath>

#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

v3::ModelConfig config_with(int64_t layers, int64_t experts) {
  auto config = tiny_config();
  config.num_hidden_layers = layers;
  config.n_routed_experts = experts;
  config.vocab_size = 400;
  config.hidden_size = 48;
  return config;
}

Tensors initialized(const v3::ModelConfig& config, uint64_t seed, double std, bool depth_scale,
                    v3::ModelSettings settings = fp64_settings()) {
  v3::Model model(config, settings);
  randomize(model, 99);  // what was there before does not matter
  v3::initialize(model, seed, std, depth_scale);
  Tensors result;
  for (const auto& list : {model.parameters(), model.buffers()}) {
    for (const auto& parameter : list) result[parameter.name] = parameter.tensor->detach().clone();
  }
  return result;
}

// Another number of layers means another order of construction; what both have is equal.
TEST(Initialize, DoesNotDependOnTheOrderOfConstruction) {
  const auto small = initialized(config_with(2, 6), 7, 0.02, false),
             large = initialized(config_with(5, 6), 7, 0.02, false);
  size_t compared = 0;
  for (const auto& [name, value] : small) {
    // Layers 2 and 3 are MTP modules in the small model.
    if (name.find("layers.2.") != std::string::npos) continue;
    if (name.find("layers.3.") != std::string::npos) continue;
    EXPECT_TRUE(at::equal(value, large.at(name))) << name;
    ++compared;
  }
  EXPECT_GT(compared, 30U);
}

// A rank with half of the experts holds the same experts.
TEST(Initialize, FirstExpertsAreThoseOfALargerModel) {
  const auto small = initialized(config_with(2, 6), 7, 0.02, false),
             large = initialized(config_with(2, 12), 7, 0.02, false);
  const std::string name = "model.layers.1.mlp.experts.up_proj.weight";
  EXPECT_TRUE(at::equal(small.at(name), large.at(name).narrow(0, 0, 6)));
}

TEST(Initialize, SeedAndNameDecide) {
  const auto config = config_with(2, 6);
  const auto one = initialized(config, 7, 0.02, false), same = initialized(config, 7, 0.02, false),
             other = initialized(config, 8, 0.02, false);
  const std::string up = "model.layers.0.mlp.up_proj.weight",
                    gate = "model.layers.0.mlp.gate_proj.weight";
  EXPECT_TRUE(at::equal(one.at(up), same.at(up)));
  EXPECT_FALSE(at::equal(one.at(up), other.at(up)));
  EXPECT_FALSE(at::equal(one.at(up), one.at(gate)));
}

TEST(Initialize, StandardDeviationsNormsAndBiases) {
  for (const auto& [name, value] : initialized(config_with(2, 6), 7, 0.006, false)) {
    const bool norm = name.find("norm") != std::string::npos;
    if (name.find("e_score_correction_bias") != std::string::npos ||
        name.find("norm.bias") != std::string::npos) {
      EXPECT_EQ(value.abs().max().item<double>(), 0.0) << name;
    } else if (norm) {
      EXPECT_TRUE(at::equal(value, at::ones_like(value))) << name;
    } else {
      // The sample's deviation differs by 1/sqrt(2n) in one of three cases; five times that never.
      const double n = static_cast<double>(value.numel());
      const double deviation = value.square().mean().sqrt().item<double>();
      EXPECT_NEAR(deviation / 0.006, 1.0, 5 / std::sqrt(2 * n)) << name;
      EXPECT_NEAR(value.mean().item<double>() / 0.006, 0.0, 5 / std::sqrt(n)) << name;
    }
  }
}

TEST(Initialize, DepthScaleTouchesResidualProjectionsOnly) {
  const auto config = config_with(2, 6);
  const auto plain = initialized(config, 7, 0.02, false),
             scaled = initialized(config, 7, 0.02, true);
  int64_t residual = 0;
  for (const auto& [name, value] : plain) {
    const bool scales = name.find("o_proj.weight") != std::string::npos ||
                        name.find("down_proj.weight") != std::string::npos;
    residual += scales;
    if (scales) {
      EXPECT_LT(max_difference(scaled.at(name) * 2, value), 1e-16) << name;  // sqrt(2 * 2 layers)
    } else {
      EXPECT_TRUE(at::equal(scaled.at(name), value)) << name;
    }
  }
  // o_proj of 2 layers and 2 MTP modules; dense, 3 x experts, 3 x shared.
  EXPECT_EQ(residual, 4 + 1 + 3 + 3);
}

TEST(Initialize, NarrowParametersAreTheWideOnesRounded) {
  v3::ModelSettings bf16;
  bf16.param_dtype = at::kBFloat16;
  const auto config = config_with(2, 6);
  const auto wide = initialized(config, 7, 0.02, false),
             narrow = initialized(config, 7, 0.02, false, bf16);
  const std::string name = "lm_head.weight";
  EXPECT_TRUE(at::equal(narrow.at(name), wide.at(name).to(at::kBFloat16)));
}

}  // namespace
}  // namespace longhaul::testing
