// Every gradient of a whole model by finite differences in fp64: the language model's and MTP's
// loss, the indexer's loss, the router's z and balance losses. Selections and routing are recorded
// once and replayed, since they are not differentiable.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>

#include "tests/models/tiny_model.h"

namespace longhaul::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// The step of central differences and the tolerance, as a share of a tensor's largest gradient:
// the truncation error h^2 f''' / 6 and the rounding 1e-16 / h are both below 1e-8.
constexpr double kStep = 1e-5;
constexpr double kTolerance = 1e-6;
constexpr int64_t kSamples = 3;  // elements of each parameter

using Objective = std::function<double(const Run&)>;

double language_model_loss(const Run& r) { return r.total; }
double indexer_loss(const Run& r) { return Run::sum(r.stats.indexer_loss); }
double all_losses(const Run& r) {
  return r.total + Run::sum(r.stats.z_loss) + Run::sum(r.stats.balance_loss);
}

class FiniteDifferences {
 public:
  FiniteDifferences(v3::Model& model, const v3::Batch& batch, Objective objective)
      : model_(model), batch_(batch), objective_(std::move(objective)) {
    run(model_, batch_, &decisions_);
  }

  Run analytic() { return run(model_, batch_, &decisions_); }

  // Derivative of the objective along `direction` of `parameters`.
  double along(const std::vector<at::Tensor*>& parameters,
               const std::vector<at::Tensor>& direction) {
    const auto value_at = [&](double offset) {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i]->add_(direction[i], offset);
      v3::ForwardContext ctx;
      Run r;
      ctx.counts.add(batch_);
      ctx.stats = &r.stats;
      ctx.decisions = &decisions_;
      r.total = forward_losses(model_, batch_, ctx).total.item<double>();
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i]->sub_(direction[i], offset);
      return objective_(r);
    };
    return (value_at(kStep) - value_at(-kStep)) / (2 * kStep);
  }

  // Names of the parameters that `wanted` picks whose sampled gradients are wrong.
  template <typename Wanted>
  std::vector<std::string> wrong(const Tensors& gradients, const Wanted& wanted) {
    std::vector<std::string> names;
    for (const auto& parameter : model_.parameters()) {
      if (!wanted(parameter.name)) continue;
      // Experts are stacked in the parameter: look at its own gradient by the views' names.
      const auto views = v3::hf_views(parameter.name, *parameter.tensor);
      for (const auto& [name, view] : views) {
        if (!matches(*parameter.tensor, view, gradients.at(name))) names.push_back(name);
      }
    }
    return names;
  }

 private:
  bool matches(at::Tensor& parameter, const at::Tensor& view, const at::Tensor& gradient) {
    const at::NoGradGuard no_grad;
    const auto flat = gradient.reshape(-1);
    const double scale = std::max(flat.abs().max().item<double>(), 1e-4);
    const int64_t stride = std::max<int64_t>(1, flat.numel() / kSamples);
    for (int64_t i = stride / 2; i < flat.numel(); i += stride) {
      at::Tensor direction = at::zeros_like(parameter);
      direction.as_strided(view.sizes(), view.strides(), view.storage_offset()).view(-1)[i] = 1;
      const double numeric = along({&parameter}, {direction});
      if (!(std::abs(numeric - flat[i].item<double>()) <= kTolerance * scale)) return false;
    }
    return true;
  }

  v3::Model& model_;
  const v3::Batch& batch_;
  Objective objective_;
  v3::Decisions decisions_;
};

bool is_trunk(const std::string& name) { return !is_indexer(name); }

TEST(ModelGradients, TrunkByFiniteDifferences) {
  const auto model = tiny_model();
  const auto batch = tiny_batch();
  FiniteDifferences differences(*model, batch, language_model_loss);
  const auto r = differences.analytic();
  EXPECT_THAT(differences.wrong(r.gradients, is_trunk), IsEmpty());

  // A wrong sign or a missing factor in one tensor is noticed.
  Tensors broken = r.gradients;
  broken.at("model.layers.1.self_attn.kv_b_proj.weight") *= -1;
  broken.at("model.layers.3.eh_proj.weight") *= 1.001;
  EXPECT_THAT(
      differences.wrong(broken, is_trunk),
      ElementsAre("model.layers.1.self_attn.kv_b_proj.weight", "model.layers.3.eh_proj.weight"));
}

// All elements of the parameters that `wanted` picks at once: no single one is left out.
void expect_gradient_along_a_direction(const v3::ModelSettings& settings,
                                       bool (*wanted)(const std::string&),
                                       const Objective& objective) {
  const auto model = tiny_model(tiny_config(), settings);
  const auto batch = tiny_batch();
  FiniteDifferences differences(*model, batch, objective);
  const Tensors gradients = differences.analytic().gradients;
  std::vector<at::Tensor*> parameters;
  std::vector<at::Tensor> direction;
  double analytic = 0;
  for (const auto& parameter : model->parameters()) {
    if (!wanted(parameter.name)) continue;
    parameters.push_back(parameter.tensor);
    direction.push_back(normal(parameter.tensor->sizes(), 30 + parameters.size(), 0.1));
    for (const auto& [name, view] : v3::hf_views(parameter.name, direction.back())) {
      analytic += (gradients.at(name) * view).sum().item<double>();
    }
  }
  EXPECT_GT(std::abs(analytic), 1e-2);
  EXPECT_NEAR(differences.along(parameters, direction) / analytic, 1.0, 1e-7);
}

TEST(ModelGradients, TrunkAlongADirection) {
  expect_gradient_along_a_direction(fp64_settings(), is_trunk, language_model_loss);
}

TEST(ModelGradients, IndexerAlongADirection) {
  for (const auto stage : {v3::IndexerStage::kSparse, v3::IndexerStage::kDenseWarmup}) {
    auto settings = fp64_settings();
    settings.stage = stage;
    expect_gradient_along_a_direction(settings, is_indexer, indexer_loss);
  }
}

TEST(ModelGradients, IndexerByFiniteDifferencesOfItsLoss) {
  const auto model = tiny_model();
  const auto batch = tiny_batch();
  FiniteDifferences differences(*model, batch, indexer_loss);
  const auto r = differences.analytic();
  EXPECT_EQ(r.stats.indexer_loss.size(), 4U) << "two layers and two MTP modules";
  EXPECT_THAT(differences.wrong(r.gradients, is_indexer), IsEmpty());
  Tensors broken = r.gradients;
  broken.at("model.layers.3.self_attn.indexer.k_norm.bias") *= -1;
  EXPECT_THAT(differences.wrong(broken, is_indexer),
              ElementsAre("model.layers.3.self_attn.indexer.k_norm.bias"));
}

TEST(ModelGradients, IndexerInDenseWarmup) {
  auto settings = fp64_settings();
  settings.stage = v3::IndexerStage::kDenseWarmup;
  const auto model = tiny_model(tiny_config(), settings);
  const auto batch = tiny_batch();
  FiniteDifferences differences(*model, batch, indexer_loss);
  const auto r = differences.analytic();
  EXPECT_THAT(differences.wrong(r.gradients, is_indexer), IsEmpty());
  for (const auto& [name, gradient] : r.gradients) EXPECT_TRUE(is_indexer(name)) << name;
}

TEST(ModelGradients, RouterLosses) {
  auto settings = fp64_settings();
  settings.z_loss_coeff = 0.3;
  settings.sequence_balance_loss_coeff = 0.2;
  const auto model = tiny_model(tiny_config(), settings);
  const auto batch = tiny_batch();
  FiniteDifferences differences(*model, batch, all_losses);
  const auto r = differences.analytic();
  EXPECT_GT(Run::sum(r.stats.z_loss), 1e-3);
  EXPECT_GT(Run::sum(r.stats.balance_loss), 1e-3);
  EXPECT_THAT(differences.wrong(r.gradients, is_trunk), IsEmpty());
  // They do change the gradients, so the test above has seen them.
  const auto plain = run(*tiny_model(), batch);
  EXPECT_GT(relative_to_max(r.gradients.at("model.layers.1.mlp.gate.weight"),
                            plain.gradients.at("model.layers.1.mlp.gate.weight")),
            1e-2);
}

TEST(ModelGradients, SoftmaxRouterWithoutQueryLatentOrGroups) {
  auto config = tiny_config();
  config.q_lora_rank = 0;
  config.n_group = config.topk_group = 1;
  config.scoring_func = v3::ScoreFunction::kSoftmax;
  config.norm_topk_prob = false;
  config.num_nextn_predict_layers = 1;
  auto settings = fp64_settings();
  settings.mla_form = v3::MlaForm::kExpanded;
  settings.mtp_after_norm = settings.mtp_own_norm = true;
  settings.z_loss_coeff = settings.sequence_balance_loss_coeff = 0.1;
  const auto model = tiny_model(config, settings);
  const auto d = documents({5, 1, 7, 2, 3, 6});
  const auto batch = pack({{d[0], d[1], d[2]}, {d[3], {}, d[4], d[5]}}, 14).batch(13);
  FiniteDifferences trunk(*model, batch, all_losses), indexer(*model, batch, indexer_loss);
  EXPECT_THAT(trunk.wrong(trunk.analytic().gradients, is_trunk), IsEmpty());
  EXPECT_THAT(indexer.wrong(indexer.analytic().gradients, is_indexer), IsEmpty());
}

}  // namespace
}  // namespace longhaul::testing
