// bf16 and broken numbers.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>

#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

// Selections and routing flip in bf16, so single values differ by much; the loss does not (the
// golden README measured 0.2%).
TEST(Bf16, LossIsNearFp32AndGradientsAreFp32) {
  for (const std::string variant : {"base", "yarn"}) {
    const auto input = load_golden("hf_" + variant + "/forward.safetensors").at("input_ids");
    const auto batch = plain_batch(input);
    for (const auto form : {v3::MlaForm::kAbsorbed, v3::MlaForm::kExpanded}) {
      v3::ModelSettings settings;
      settings.mla_form = form;
      const auto wide = run(*golden_model("hf_" + variant, settings), batch);
      settings.compute_dtype = at::kBFloat16;
      const auto narrow = run(*golden_model("hf_" + variant, settings), batch);
      EXPECT_NE(narrow.total, wide.total) << "was this bf16 at all?";
      EXPECT_NEAR(narrow.total / wide.total, 1.0, 5e-3);
      EXPECT_EQ(narrow.gradients.size(), wide.gradients.size());
      for (const auto& [name, gradient] : narrow.gradients) {
        EXPECT_EQ(gradient.scalar_type(), at::kFloat) << name;
        EXPECT_TRUE(gradient.isfinite().all().item<bool>()) << name;
      }
      for (const auto& [layer, loss] : narrow.stats.indexer_loss) {
        EXPECT_EQ(loss.scalar_type(), at::kFloat) << "the indexer's loss stays fp32";
      }
    }
  }
}

// With selections and routing held, bf16 rounds and nothing else: gradients point the same way.
TEST(Bf16, GradientsPointTheSameWayWithDecisionsHeld) {
  const auto batch = plain_batch(load_golden("hf_base/forward.safetensors").at("input_ids"));
  v3::ModelSettings settings;
  v3::Decisions decisions;
  const auto wide = run(*golden_model("hf_base", settings), batch, &decisions);
  settings.compute_dtype = at::kBFloat16;
  const auto narrow = run(*golden_model("hf_base", settings), batch, &decisions);
  for (const auto& [name, gradient] : wide.gradients) {
    const auto a = gradient.flatten().to(at::kDouble),
               b = narrow.gradients.at(name).flatten().to(at::kDouble);
    if (a.norm().item<double>() == 0) continue;  // an expert without tokens
    EXPECT_GT((a.dot(b) / (a.norm() * b.norm())).item<double>(), 0.99) << name;
  }
}

// NaN in any parameter comes out as NaN in a loss (the indexer's in its own), without an exception
// or a hang, forward and backward. It must not be swallowed by a top-k.
class NonFinite : public ::testing::TestWithParam<double> {};

TEST_P(NonFinite, ParametersShowInALoss) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    v3::ModelSettings settings;
    settings.param_dtype = settings.compute_dtype = dtype;
    const auto batch = tiny_batch();
    std::vector<std::string> names;
    for (const auto& parameter : tiny_model(tiny_config(), settings)->parameters()) {
      names.push_back(parameter.name);
    }
    for (const auto& name : names) {
      const auto model = tiny_model(tiny_config(), settings);
      for (const auto& parameter : model->parameters()) {
        const at::NoGradGuard no_grad;
        if (parameter.name == name) parameter.tensor->fill_(GetParam());
      }
      testing::Run r;
      ASSERT_NO_THROW(r = run(*model, batch)) << name;
      if (std::isinf(GetParam())) continue;
      EXPECT_TRUE(std::isnan(is_indexer(name) ? Run::sum(r.stats.indexer_loss) : r.total)) << name;
    }
  }
}

TEST_P(NonFinite, RouterBiasDoesNotCrash) {
  const auto model = tiny_model();
  for (const auto& buffer : model->buffers()) buffer.tensor->fill_(GetParam());
  EXPECT_NO_THROW(run(*model, tiny_batch()));
}

INSTANTIATE_TEST_SUITE_P(Values, NonFinite, ::testing::Values(NAN, INFINITY, -INFINITY));

}  // namespace
}  // namespace longhaul::testing
