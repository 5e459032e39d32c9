// 20 optimizer steps against transformers and torchtitan-npu: loss, KL of each layer and gradient
// norm at every step, parameter norms and router biases at the end.
#include "longhaul/checkpoint/tensor_file.h"
#include "longhaul/models/deepseek_v3/hf_adapter.h"
#include "longhaul/train/losses.h"
#include "longhaul/train/resolve_model.h"
#include "longhaul/train/trainer.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {
namespace {

using Overrides = std::vector<std::string>;

// The files' own tolerance for legitimate fp32 re-orderings along 20 steps; fp64 stays within it.
constexpr double kLossTolerance = 4e-6;

struct Case {
  std::string name;
  std::string checkpoint;  // hf_base, hf_yarn
  std::string file;        // reference trajectory
  Overrides overrides;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class Trajectory : public ::testing::TestWithParam<std::tuple<Case, std::string>> {};

void compare_end(const Tensors& golden, const fs::path& dump) {
  const auto dumped = checkpoint::load_safetensors(dump);
  for (const auto& [name, expected] : golden) {
    if (name.rfind("final_norm.", 0) == 0) {
      const auto found = dumped.find("param." + name.substr(11));
      ASSERT_NE(found, dumped.end()) << name;
      const double norm = found->second.to(at::kDouble).norm().item<double>();
      EXPECT_NEAR(norm, expected.item<double>(), 3e-6 * expected.item<double>() + 1e-7) << name;
    } else if (name.rfind("final.", 0) == 0) {
      EXPECT_LT(max_difference(dumped.at("param." + name.substr(6)), expected), 1e-6) << name;
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
                5e-6)
        << "step " << i + 1;
    if (golden.count("kl_per_layer") == 0) continue;
    const auto kl = golden.at("kl_per_layer")[i];
    ASSERT_EQ(static_cast<int64_t>(metrics[i]["indexer_loss_per_layer"].size()), kl.size(0));
    for (int64_t layer = 0; layer < kl.size(0); ++layer) {
      EXPECT_NEAR(metrics[i]["indexer_loss_per_layer"][layer].get<double>(),
                  kl[layer].item<double>(), 5e-6);
    }
  }
  compare_end(golden, job.folder.path() / "run/dump/step-20.safetensors");
}

const Overrides kFixedBias = {"--moe.bias_update_speed", "0"};
const Overrides kNoIndexerLoss = {"--moe.bias_update_speed", "0", "--dsa.train_indexer", "false"};

INSTANTIATE_TEST_SUITE_P(
    All, Trajectory,
    ::testing::Combine(
        ::testing::Values(
            Case{"base", "hf_base", "hf_base/train20.safetensors", kNoIndexerLoss},
            Case{"yarn", "hf_yarn", "hf_yarn/train20.safetensors", kNoIndexerLoss},
            Case{"base_kl", "hf_base", "tt_base/train20.safetensors", kFixedBias},
            Case{"yarn_kl", "hf_yarn", "tt_yarn/train20.safetensors", kFixedBias},
            Case{"base_bias", "hf_base", "tt_base/train20_bias_update.safetensors", {}},
            Case{"yarn_bias", "hf_yarn", "tt_yarn/train20_bias_update.safetensors", {}}),
        ::testing::Values("absorbed", "expanded")),
    [](const auto& info) { return std::get<0>(info.param).name + "_" + std::get<1>(info.param); });

// In fp32 the discrete choices must be the reference's for losses to be comparable over 20 steps.
// The vectors of transformers keep clear of every boundary; step 6 of tt_base does not (layer 1 has
// two scores 6e-7 apart, below fp32's noise after five AdamW steps), so it is compared up to there.
TEST(TrajectoryFp32, EqualsReference) {
  struct Fp32Case {
    std::string checkpoint, file;
    Overrides overrides;
    int64_t steps;
  };
  for (const auto& c : {Fp32Case{"hf_base", "hf_base/train20.safetensors", kNoIndexerLoss, 20},
                        Fp32Case{"hf_yarn", "hf_yarn/train20.safetensors", kNoIndexerLoss, 20},
                        Fp32Case{"hf_base", "tt_base/train20.safetensors", kFixedBias, 5}}) {
    for (const std::string form : {"absorbed", "expanded"}) {
      const auto golden = load_golden(c.file);
      const GoldenJob job(c.checkpoint, golden.at("batches"));
      Overrides overrides = {"--model.mla_form", form};
      overrides.insert(overrides.end(), c.overrides.begin(), c.overrides.end());
      run(job.config(overrides));
      const auto metrics = job.metrics();
      for (int64_t i = 0; i < c.steps; ++i) {
        EXPECT_NEAR(metrics[i]["lm_loss"].get<double>(), golden.at("loss")[i].item<double>(),
                    kLossTolerance)
            << c.file << " " << form << " step " << i + 1;
      }
    }
  }
}

}  // namespace
}  // namespace longhaul::testing
