// 20 optimizer steps against transformers and torchtitan-npu: the loss at every step, and where no
// near tie of index scores goes another way (see kCases) the KL of each layer and the gradient's
// norm at every step, parameter norms and router biases at the end. Whole runs of the trainer with
// the reference operators in fp64; the bare model with the reference operators in fp32 and fp64,
// and in fp32 with all converters and with each converter alone.
#include <algorithm>

#include "longhaul/checkpoint/tensor_file.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/optim/adam_w.h"
#include "longhaul/optim/gradients.h"
#include "longhaul/optim/router_bias.h"
#include "tests/models/model_fixture.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {
namespace {

using Overrides = std::vector<std::string>;

// The files' own tolerance for legitimate fp32 re-orderings along 20 steps; fp64 stays within it.
constexpr double kLossTolerance = 3e-6;
constexpr double kNormTolerance = 1e-6;
// fp64 against the reference's fp32 steps: 1.0e-6 to 1.3e-6 from step 15 on, always above it.
constexpr double kNormToleranceFp64 = 1.5e-6;
// Fused kernels in fp32 sum in yet other orders: 1.1e-6 was measured. Where a near tie goes the
// other way and the loss does not show it (see near_ties), the norm does: up to 1.4e-5.
constexpr double kNormToleranceFused = 2e-6;
constexpr double kTiedNormTolerance = 3e-5;
constexpr double kKlTolerance = 3e-6;  // relative
// Sums in other orders along 20 steps of fp32.
constexpr double kKlToleranceStepped = 5e-5;
constexpr double kFinalNormTolerance = 3e-6;  // relative
constexpr double kFinalNormToleranceFp32 = 3e-5;

struct Case {
  std::string name;
  std::string checkpoint;  // hf_base, hf_yarn
  std::string file;        // reference trajectory
  Overrides overrides;
  // Two index scores come so near to each other that fp32 may select the other key. Where the loss
  // does not show it, the gradient's norm does: up to 1.4e-5 was measured.
  bool near_ties = false;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Trajectory : public ::testing::TestWithParam<std::tuple<Case, std::string>> {};

// The norms of all parameters and the routers' biases; the names of `found` begin with `prefix`.
void compare_end(const Tensors& golden, const Tensors& found, const std::string& prefix,
                 double tolerance) {
  for (const auto& [name, expected] : golden) {
    if (name.rfind("final_norm.", 0) == 0) {
      const auto at = found.find(prefix + name.substr(11));
      ASSERT_NE(at, found.end()) << name;
      const double norm = at->second.to(at::kDouble).norm().item<double>();
      EXPECT_NEAR(norm, expected.item<double>(), tolerance * expected.item<double>() + 1e-7)
          << name;
    } else if (name.rfind("final.", 0) == 0) {
      EXPECT_LT(max_difference(found.at(prefix + name.substr(6)), expected), 1e-6) << name;
    }
  }
}

TEST_P(Trajectory, EqualsReferenceInFp64) {
  const auto& [c, form] = GetParam();
  const auto golden = load_golden(c.file);
  const GoldenJob job(c.checkpoint, golden.at("batches"));
  Overrides overrides = {"--training.dtype",   "float64", "--model.mla_form", form,
                         "--debug.dump_steps", "20"};
  overrides.insert(overrides.end(), c.overrides.begin(), c.overrides.end());
  ASSERT_EQ(run(job.config(overrides)), train::Outcome::kFinished);

  const auto metrics = job.metrics();
  ASSERT_EQ(metrics.size(), 20u);
  for (int64_t i = 0; i < 20; ++i) {
    EXPECT_NEAR(metrics[i]["lm_loss"].get<double>(), golden.at("loss")[i].item<double>(),
                kLossTolerance)
        << "step " << i + 1;
    EXPECT_NEAR(metrics[i]["grad_norm"].get<double>() / golden.at("grad_norm")[i].item<double>(), 1,
                kNormToleranceFp64)
        << "step " << i + 1;
    if (golden.count("kl_per_layer") == 0) continue;
    const auto kl = golden.at("kl_per_layer")[i];
    ASSERT_EQ(static_cast<int64_t>(metrics[i]["indexer_loss_per_layer"].size()), kl.size(0));
    for (int64_t layer = 0; layer < kl.size(0); ++layer) {
      EXPECT_NEAR(metrics[i]["indexer_loss_per_layer"][layer].get<double>(),
                  kl[layer].item<double>(), kKlTolerance * kl[layer].item<double>())
          << "step " << i + 1 << " layer " << layer;
    }
  }
  const auto dumped = job.folder.path() / "run/dump/step-20.safetensors";
  compare_end(golden, checkpoint::load_safetensors(dumped), "param.", kFinalNormTolerance);
}

const Overrides kFixedBias = {"--moe.bias_update_speed", "0"};
const Overrides kNoIndexerLoss = {"--moe.bias_update_speed", "0", "--dsa.train_indexer", "false"};

const std::vector<Case> kCases = {
    {"base", "hf_base", "hf_base/train20.safetensors", kNoIndexerLoss},
    {"yarn", "hf_yarn", "hf_yarn/train20.safetensors", kNoIndexerLoss},
    {"base_kl", "hf_base", "tt_base/train20.safetensors", kFixedBias, /*near_ties=*/true},
    {"yarn_bias", "hf_yarn", "tt_yarn/train20_bias_update.safetensors", {}},
    {"yarn_kl", "hf_yarn", "tt_yarn/train20.safetensors", kFixedBias},
    {"base_bias", "hf_base", "tt_base/train20_bias_update.safetensors", {}, /*near_ties=*/true}};

// The first four: in the others the reference meets a near tie, see below.
INSTANTIATE_TEST_SUITE_P(All, Trajectory,
                         ::testing::Combine(::testing::ValuesIn(kCases.begin(), kCases.begin() + 4),
                                            ::testing::Values("absorbed", "expanded")),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_" + std::get<1>(info.param);
                         });

// The same trajectories step by step on the bare model, in fp32 too. Where two index scores lie
// nearer to each other than fp32's noise after some AdamW steps, the reference may have taken the
// other key: then the loss differs at that step, some pair must be within that noise, and with the
// other key of that pair the step, and all that follow, must equal the reference.

// Decisions with the other key of a pair, and how far apart the two keys' scores are.
struct Exchange {
  double gap;
  v3::Decisions decisions;
};

class Stepper {
 public:
  Stepper(const Case& c, const v3::ModelSettings& settings, const Path& path, bool update_bias)
      : model_(model_on(c.checkpoint, settings, path)),
        optimizer_(model_->parameters(), optim::AdamWConfig{}),
        update_bias_(update_bias) {}

  // The language model's loss of this step's forward pass; `decisions` are kept to.
  double forward(const at::Tensor& ids, v3::Decisions decisions) {
    zero_gradients(*model_);
    batch_ = plain_batch(ids);
    stats_ = {};
    probed_.clear();
    decisions_ = std::move(decisions);
    v3::ForwardContext ctx;
    ctx.counts.add(batch_);
    ctx.stats = &stats_;
    ctx.decisions = &decisions_;
    ctx.probe = [this](const std::string& name, int64_t layer, const at::Tensor& value) {
      probed_[name + std::to_string(layer)] = value.detach();
    };
    const auto losses = forward_losses(*model_, batch_, ctx);
    total_ = losses.total;
    return losses.by_tower[0];
  }

  // Of the last pass, in each layer for the rows with the smallest gaps between the last key to
  // select and the first to leave out (by fp64 scores): the decisions up to that layer with these
  // two exchanged. The nearest pair first.
  std::vector<Exchange> nearest_exchanges() const {
    std::vector<Exchange> exchanges;
    for (const auto& [layer, indices] : decisions_.topk_indices) {
      const std::string n = std::to_string(layer);
      const int64_t K = indices.size(2), S = indices.size(1);
      const auto scores = ops::indexer_scores(probed_.at("indexer_query" + n).to(at::kDouble),
                                              probed_.at("indexer_key" + n).to(at::kDouble),
                                              probed_.at("indexer_weights" + n).to(at::kDouble))
                              .masked_fill(at::ones({S, S}, at::kBool).triu(1), -INFINITY);
      const auto [sorted, order] = scores.sort(-1, /*descending=*/true);
      // Rows that see no more than K keys have an infinite gap.
      const auto gap =
          (sorted.select(2, K - 1) - sorted.select(2, K)).nan_to_num(INFINITY).flatten();
      const auto keys = order.flatten(0, 1);
      const auto rows = gap.argsort();
      for (int64_t i = 0; i < 3; ++i) {
        const int64_t row = rows[i].item<int64_t>();
        exchanges.push_back(
            {gap[row].item<double>(), exchanged(layer, row, keys[row][K - 1].item<int64_t>(),
                                                keys[row][K].item<int64_t>())});
      }
    }
    std::sort(exchanges.begin(), exchanges.end(),
              [](const Exchange& x, const Exchange& y) { return x.gap < y.gap; });
    return exchanges;
  }

  // Of the last pass.
  const v3::StepStats& stats() const { return stats_; }

  Tensors weights() const { return testing::weights(*model_); }

  // Returns the gradient's norm.
  double update() {
    backward(total_);
    if (update_bias_) {
      for (auto& [layer, router] : model_->routers()) {
        optim::update_router_bias(router->bias(), stats_.expert_counts.at(layer), 1e-3, true);
      }
    }
    const double norm = optim::gradient_norm(model_->parameters(), 2);
    optimizer_.step(1e-3, optim::clip_factor(norm, 1.0));
    return norm;
  }

 private:
  // The decisions up to the layer, where one row has the other one of two keys.
  v3::Decisions exchanged(int64_t at_layer, int64_t at_row, int64_t key, int64_t other) const {
    v3::Decisions decisions;
    for (const auto& [layer, indices] : decisions_.topk_indices) {
      if (layer <= at_layer) decisions.topk_indices[layer] = indices.clone();
    }
    auto row = decisions.topk_indices.at(at_layer).flatten(0, 1)[at_row];
    if (!(row == key).any().item<bool>()) std::swap(key, other);
    row.masked_fill_(row == key, other);
    row.copy_(std::get<0>(row.sort()));
    return decisions;
  }

  std::unique_ptr<v3::Model> model_;
  optim::AdamW optimizer_;
  bool update_bias_;
  v3::Batch batch_;
  v3::StepStats stats_;
  v3::Decisions decisions_;
  Tensors probed_;
  at::Tensor total_;
};

// Index scores of these models are of order 1; single AdamW elements differ by up to 5e-5 between
// implementations after the first step, where a gradient is as small as fp32's noise.
constexpr double kNearTie = 3e-4;

void compare_kl(const v3::StepStats& stats, const at::Tensor& kl, int64_t step) {
  ASSERT_EQ(static_cast<int64_t>(stats.indexer_loss.size()), kl.size(0));
  for (int64_t layer = 0; layer < kl.size(0); ++layer) {
    EXPECT_NEAR(stats.indexer_loss.at(layer).item<double>() / kl[layer].item<double>(), 1,
                kKlToleranceStepped)
        << "step " << step << " layer " << layer;
  }
}

class SteppedTrajectory : public ::testing::TestWithParam<std::tuple<Case, Path, at::ScalarType>> {
};

TEST_P(SteppedTrajectory, EqualsReference) {
  const auto& [c, path, dtype] = GetParam();
  const auto golden = load_golden(c.file);
  v3::ModelSettings settings;
  settings.param_dtype = settings.compute_dtype = dtype;
  settings.train_indexer = golden.count("kl_per_layer") == 1;
  Stepper stepper(c, settings, path, c.overrides.empty());
  int exchanges = 0;
  bool tied = false;  // a near tie went the other way: the steps after it differ too
  for (int64_t i = 0; i < 20; ++i) {
    const double expected = golden.at("loss")[i].item<double>();
    double loss = stepper.forward(golden.at("batches")[i], {});
    if (std::abs(loss - expected) > kLossTolerance) {
      for (const auto& [gap, decisions] : stepper.nearest_exchanges()) {
        if (gap >= kNearTie || std::abs(loss - expected) <= kLossTolerance) break;
        loss = stepper.forward(golden.at("batches")[i], decisions);
      }
      ++exchanges;
    }
    ASSERT_NEAR(loss, expected, kLossTolerance) << "step " << i + 1;
    const double norm = stepper.update();
    if (c.near_ties) continue;
    const double deviation = std::abs(norm / golden.at("grad_norm")[i].item<double>() - 1);
    if (path.fused == "none") {
      EXPECT_LT(deviation, dtype == at::kFloat ? kNormTolerance : kNormToleranceFp64)
          << "step " << i + 1;
    } else {
      EXPECT_LT(deviation, kTiedNormTolerance) << "step " << i + 1;
      if (!tied && deviation > kNormToleranceFused) {
        EXPECT_LT(stepper.nearest_exchanges().front().gap, kNearTie) << "step " << i + 1;
        tied = true;
      }
    }
    // The pass whose loss is the reference's was this step's last.
    if (!tied && settings.train_indexer) {
      compare_kl(stepper.stats(), golden.at("kl_per_layer")[i], i + 1);
    }
  }
  EXPECT_LE(exchanges, 2);
  if (exchanges > 0 || tied || c.near_ties) return;
  compare_end(golden, stepper.weights(), "",
              dtype == at::kDouble ? kFinalNormTolerance : kFinalNormToleranceFp32);
}

std::string name_of(const ::testing::TestParamInfo<SteppedTrajectory::ParamType>& info) {
  return std::get<0>(info.param).name + "_" + std::get<1>(info.param).name +
         (std::get<2>(info.param) == at::kFloat ? "_fp32" : "_fp64");
}

INSTANTIATE_TEST_SUITE_P(Reference, SteppedTrajectory,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::ValuesIn(reference_paths()),
                                            ::testing::Values(at::kFloat, at::kDouble)),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Fused, SteppedTrajectory,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::ValuesIn(fused_paths()),
                                            ::testing::Values(at::kFloat)),
                         name_of);

}  // namespace
}  // namespace longhaul::testing
