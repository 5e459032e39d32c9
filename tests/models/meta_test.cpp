// A whole step on the Meta device: shapes without memory, for planning. Forward, backward, the
// routers' biases and AdamW run, and every parameter that learns gets a gradient of its shape.
#include <gmock/gmock.h>

#include "longhaul/optim/adam_w.h"
#include "longhaul/optim/router_bias.h"
#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

using ::testing::IsEmpty;

v3::ModelSettings meta_settings(at::ScalarType compute) {
  v3::ModelSettings s;
  s.device = at::kMeta;
  s.compute_dtype = compute;
  s.sequence_balance_loss_coeff = s.z_loss_coeff = 1e-3;
  s.hadamard = true;
  return s;
}

// Two rows of a short and a long document, with the extra slots that MTP reads.
v3::Batch meta_batch(const v3::ModelConfig& config, int64_t S) {
  const int64_t width = S + config.num_nextn_predict_layers;
  const auto positions = at::cat({at::arange(7), at::arange(width - 7)}).expand({2, width});
  const auto ids = at::zeros({2, width}, at::kLong);
  return v3::prepare_batch(ids, ids, positions.contiguous(), S).to(at::kMeta);
}

// The update after the backward pass. Moments are of their parameter's shape and without memory.
void update(v3::Model& model, const v3::StepStats& stats) {
  for (auto& [layer, router] : model.routers()) {
    if (!router->bias().defined()) continue;  // a softmax router has none
    optim::update_router_bias(router->bias(), stats.expert_counts.at(layer), 1e-3, true);
    EXPECT_TRUE(router->bias().is_meta());
  }
  optim::AdamW optimizer(model.parameters(), {});
  optimizer.step(/*lr=*/1e-3, /*grad_scale=*/0.5);
  size_t learning = 0;
  for (const auto& parameter : model.parameters()) {
    if (!parameter.tensor->requires_grad()) continue;
    ++learning;
    const auto& state = optimizer.state().at(parameter.name);
    EXPECT_TRUE(state.exp_avg.is_meta() && state.exp_avg_sq.is_meta()) << parameter.name;
    EXPECT_EQ(state.exp_avg.sizes(), parameter.tensor->sizes()) << parameter.name;
  }
  EXPECT_EQ(optimizer.state().size(), learning);
}

// Parameters without a gradient of their shape, dtype and device after a step.
std::vector<std::string> without_gradient(const v3::ModelConfig& config,
                                          const v3::ModelSettings& settings, int64_t S) {
  v3::Model model(config, settings);
  const auto batch = meta_batch(config, S);
  v3::StepStats stats;
  v3::ForwardContext ctx;
  ctx.counts.add(batch);
  ctx.stats = &stats;
  const auto hidden = model.forward(batch, ctx);
  at::Tensor total;
  for (size_t i = 0; i < hidden.size(); ++i) {
    EXPECT_EQ(hidden[i].sizes(), at::IntArrayRef({2, S, config.hidden_size}));
    const auto loss = ops::linear_cross_entropy(
        hidden[i], model.lm_head().weight.to(hidden[i].scalar_type()), batch.towers[i].labels);
    total = i == 0 ? loss : total + loss;
  }
  backward(total);
  std::vector<std::string> names;
  for (const auto& parameter : model.parameters()) {
    const auto& grad = parameter.tensor->grad();
    const bool fine = grad.defined() && grad.is_meta() &&
                      grad.sizes() == parameter.tensor->sizes() &&
                      grad.scalar_type() == parameter.tensor->scalar_type();
    if (fine != parameter.tensor->requires_grad()) names.push_back(parameter.name);
  }
  update(model, stats);
  return names;
}

TEST(Meta, TinyInEveryForm) {
  const auto config = v3::find_flavor("deepseek_v32", "tiny");
  for (const auto form : {v3::MlaForm::kAbsorbed, v3::MlaForm::kExpanded}) {
    for (const auto stage :
         {v3::IndexerStage::kSparse, v3::IndexerStage::kDenseWarmup, v3::IndexerStage::kOff}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        auto settings = meta_settings(dtype);
        settings.mla_form = form;
        settings.stage = stage;
        EXPECT_THAT(without_gradient(config, settings, 33), IsEmpty());
      }
    }
  }
}

TEST(Meta, WithMtp) {
  EXPECT_THAT(without_gradient(tiny_config(), meta_settings(at::kBFloat16), 17), IsEmpty());
}

// Published shapes: no query latent and a softmax router; groups and 256 experts.
TEST(Meta, RealSizes) {
  for (const std::string flavor : {"16B", "671B"}) {
    const auto config = v3::find_flavor("deepseek_v32", flavor);
    EXPECT_THAT(without_gradient(config, meta_settings(at::kBFloat16), 4096), IsEmpty()) << flavor;
  }
}

TEST(Meta, InitialisationTouchesNothing) {
  v3::Model model(v3::find_flavor("deepseek_v32", "16B"), meta_settings(at::kFloat));
  EXPECT_NO_THROW(v3::initialize(model, 1, 0.02, true));
  int64_t elements = 0;
  for (const auto& parameter : model.parameters()) elements += parameter.tensor->numel();
  // 15.7 thousand million of V2-Lite, and its indexers.
  EXPECT_GT(elements, 15'700'000'000);
  EXPECT_LT(elements, 16'500'000'000);
}

}  // namespace
}  // namespace longhaul::testing
