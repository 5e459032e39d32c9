// What a run does with its settings: accumulation, the non-finite guard, dumps, time limits, text.
#include <gmock/gmock.h>

#include "longhaul/base/fault.h"
#include "longhaul/base/system.h"
#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/tensor_file.h"
#include "longhaul/config/write.h"
#include "longhaul/models/deepseek_v3/flops.h"
#include "longhaul/train/preflight.h"
#include "longhaul/train/setup.h"
#include "tests/support/log_capture.h"
#include "tests/support/temp_folder.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {
namespace {

using Overrides = std::vector<std::string>;

const at::Tensor& batches() {
  static const at::Tensor loaded = load_golden("hf_base/train20.safetensors").at("batches");
  return loaded;
}

// Rows with unequal numbers of ignored labels, and a padded tail.
void write_uneven_rows(const fs::path& path) {
  const auto ids = batches().reshape({-1, 48});
  std::string text;
  for (int64_t i = 0; i < 8; ++i) {
    std::vector<int64_t> row, labels, positions;
    for (int64_t t = 0; t < 48; ++t) {
      const bool padding = i % 3 == 2 && t >= 40;
      row.push_back(ids[i][t].item<int64_t>());
      const bool ignored = padding || t == 47 || t < 5 * i;
      labels.push_back(ignored ? -100 : ids[i][t + 1].item<int64_t>());
      positions.push_back(padding ? -1 : t < 20 ? t : t - 20);
    }
    text +=
        nlohmann::json{{"input_ids", row}, {"labels", labels}, {"position_ids", positions}}.dump() +
        "\n";
  }
  write_text(path, text);
}

// Runs a step whose weights cannot be saved alone; the whole state of it is there nevertheless.
void expect_rescued(const Overrides& more, const std::string& error) {
  const GoldenJob job("hf_base", batches());
  Overrides overrides = {"--training.steps", "1"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  try {
    run(job.config(overrides));
    ADD_FAILURE() << "the weights were saved";
  } catch (const Error& failure) {
    EXPECT_NE(std::string(failure.what()).find(error), std::string::npos) << failure.what();
  }
  const auto saved = checkpoint::find_resumable(job.folder.path() / "run/checkpoint");
  ASSERT_TRUE(saved);
  EXPECT_EQ(checkpoint::load(*saved).step, 1);
}

TEST(Run, WeightsThatCannotBeSavedAloneLoseNoStep) {
  for (const char* mode : {"disabled", "async"}) {
    SCOPED_TRACE(mode);
    expect_rescued({"--checkpoint.async_mode", mode, "--checkpoint.export_dtype", "float16",
                    "--optimizer.lr", "1e6"},
                   "above 65504");
  }
}

TEST(Run, WeightsWhoseSaveFailsLoseNoStep) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  for (const char* mode : {"disabled", "async"}) {
    SCOPED_TRACE(mode);
    {
      const fault::Armed full_disk("checkpoint.manifest:1:enospc");
      expect_rescued({"--checkpoint.async_mode", mode}, "cannot save step 1");
    }
    const fault::Armed unforeseen("checkpoint.shard:1:throw");
    expect_rescued({"--checkpoint.async_mode", mode}, "fault injection");
  }
}

// A step that takes a second gives the save beside it the time to fail.
TEST(Run, ASaveThatFailsInTheBackgroundIsReportedAndTrainingGoesOn) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const GoldenJob job("hf_base", batches());
  const test::LogCapture log;
  const fault::Armed armed("checkpoint.manifest:1:enospc,train.step:2:delay-1000");
  EXPECT_EQ(run(job.config({"--training.steps", "3", "--checkpoint.async_mode", "async",
                            "--checkpoint.enable_first_step_checkpoint",
                            "--checkpoint.last_save_model_only", "false"})),
            train::Outcome::kFinished);
  EXPECT_NE(log.text().find("a checkpoint could not be saved, and training goes on without it: "
                            "cannot save step 1"),
            std::string::npos)
      << log.text();
  const auto steps = checkpoint::list_steps(job.folder.path() / "run/checkpoint");
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_EQ(steps[0].step, 3);
}

// On so many ranks what training takes fits, and with the copy it does not.
TEST(Run, TheCopyForSavesInTheBackgroundCountsAsMemory) {
  const GoldenJob job("hf_base", batches());
  const auto config = [&](const char* mode) {
    return job.config({"--model.flavor", "671B", "--checkpoint.async_mode", mode});
  };
  const auto plain = config("disabled"), behind = config("async");
  const auto resolved = resolve_model(plain);
  const int64_t parameters =
      deepseek_v3::count_parameters(resolved.shape, train::model_settings(plain, at::kCPU)).total;
  const int64_t pieces = parameters * 4 * 5 / machine_memory_bytes() + 1;
  EXPECT_NO_THROW(train::check_machine(plain, resolved, pieces));
  try {
    train::check_machine(behind, resolved, pieces);
    FAIL() << "no error";
  } catch (const UserError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("and the copy for checkpoint.async_mode on each of"), std::string::npos)
        << text;
  }
  // Two ranks here take twice that.
  EXPECT_THAT(test::error_of<UserError>([&] { train::check_machine(plain, resolved, pieces, 2); }),
              ::testing::HasSubstr("gradients and moments on each of 2 ranks here"));
}

TEST(Run, AccumulationGivesTheGradientsOfTheWholeBatch) {
  const GoldenJob whole("hf_base", batches()), parts("hf_base", batches());
  for (const auto* job : {&whole, &parts}) write_uneven_rows(job->folder.path() / "rows.jsonl");
  const Overrides common = {"--training.dtype",
                            "float64",
                            "--training.steps",
                            "2",
                            "--debug.dump_steps",
                            "1,2",
                            "--moe.sequence_balance_loss_coeff",
                            "0.01",
                            "--moe.z_loss_coeff",
                            "0.001"};
  auto with = [&](Overrides more) {
    more.insert(more.begin(), common.begin(), common.end());
    return more;
  };
  run(whole.config(with({"--training.local_batch_size", "4"})));
  run(parts.config(
      with({"--training.local_batch_size", "1", "--training.global_batch_size", "4"})));
  for (const char* step : {"step-1.safetensors", "step-2.safetensors"}) {
    const auto a = checkpoint::load_safetensors(whole.folder.path() / "run/dump" / step);
    const auto b = checkpoint::load_safetensors(parts.folder.path() / "run/dump" / step);
    ASSERT_EQ(a.size(), b.size());
    for (const auto& [name, tensor] : a) {
      EXPECT_LT(relative_to_max(b.at(name), tensor), 1e-9) << step << " " << name;
    }
  }
  EXPECT_EQ(whole.metrics()[1]["tokens"], parts.metrics()[1]["tokens"]);
}

TEST(Run, DumpHoldsGradientsParametersAndLosses) {
  const GoldenJob job("hf_base", batches());
  run(job.config({"--training.steps", "1", "--debug.dump_steps", "1",
                  "--moe.sequence_balance_loss_coeff", "0.01", "--moe.z_loss_coeff", "0.001"}));
  const auto dump = checkpoint::load_safetensors(job.folder.path() / "run/dump/step-1.safetensors");
  EXPECT_EQ(dump.at("grad.model.layers.1.mlp.experts.3.up_proj.weight").sizes(),
            (std::vector<int64_t>{16, 128}));
  EXPECT_EQ(dump.at("param.lm_head.weight").scalar_type(), at::kFloat);
  EXPECT_TRUE(dump.count("param.model.layers.1.mlp.gate.e_score_correction_bias"));
  // Before clipping: the norm over all gradients is the one that is logged.
  double squares = 0;
  for (const auto& [name, tensor] : dump) {
    if (name.rfind("grad.", 0) == 0)
      squares += tensor.to(at::kDouble).square().sum().item<double>();
  }
  EXPECT_NEAR(std::sqrt(squares), job.metrics()[0]["grad_norm"].get<double>(), 1e-5);
  for (const char* loss : {"loss", "lm_loss", "mtp_loss", "balance_loss", "z_loss"}) {
    ASSERT_TRUE(dump.count(loss)) << loss;
    EXPECT_NEAR(dump.at(loss).item<double>(), job.metrics()[0][loss].get<double>(), 1e-12) << loss;
  }
  EXPECT_GT(dump.at("balance_loss").item<double>(), 0);
  EXPECT_GT(dump.at("z_loss").item<double>(), 0);
}

// Whether libtorch still runs an operator that has no deterministic algorithm.
bool runs_a_nondeterministic_operator() {
  try {
    at::max_unpool2d(at::ones({1, 1, 1}), at::zeros({1, 1, 1}, at::kLong), {2, 2});
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

TEST(Run, DeterministicLeavesNoOtherAlgorithms) {
  const GoldenJob strict("hf_base", batches()), lenient("hf_base", batches()),
      plain("hf_base", batches());
  run(strict.config({"--training.steps", "2", "--debug.deterministic"}));
  EXPECT_FALSE(runs_a_nondeterministic_operator());
  run(lenient.config(
      {"--training.steps", "2", "--debug.deterministic", "--debug.deterministic_warn_only"}));
  EXPECT_TRUE(runs_a_nondeterministic_operator());
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  run(plain.config({"--training.steps", "2"}));
  EXPECT_FALSE(at::globalContext().deterministicAlgorithms());
  // On a CPU the numbers are the same: everything was deterministic before.
  EXPECT_EQ(strict.metrics()[1]["loss"], plain.metrics()[1]["loss"]);
  EXPECT_EQ(lenient.metrics()[1]["loss"], plain.metrics()[1]["loss"]);
}

// A learning rate that ends in infinities by the second or third step.
const Overrides kExploding = {"--optimizer.lr",        "1e30", "--training.max_norm", "inf",
                              "--checkpoint.interval", "1"};

TEST(Run, ANonFiniteStepStopsBeforeTheUpdate) {
  const GoldenJob job("hf_base", batches());
  try {
    run(job.config(kExploding));
    FAIL() << "no error";
  } catch (const UserError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("not finite"), std::string::npos) << text;
    EXPECT_NE(text.find("optimizer.lr"), std::string::npos) << text;
  }
  // The last checkpoint holds the weights before that step.
  const auto steps = checkpoint::list_steps(job.folder.path() / "run/checkpoint");
  ASSERT_FALSE(steps.empty());
  EXPECT_EQ(steps[0].step, static_cast<int64_t>(job.metrics().size()));
}

// The weights before it are finite, but may be what it comes of: older checkpoints stay.
TEST(Run, BeforeANonFiniteStepOlderCheckpointsStay) {
  const GoldenJob job("hf_base", batches());
  Overrides overrides = {"--checkpoint.keep_latest_k", "1", "--checkpoint.last_save_model_only",
                         "false"};
  Overrides good = overrides;
  good.insert(good.end(), {"--training.steps", "1"});
  run(job.config(good));
  overrides.insert(overrides.end(), {"--optimizer.lr", "1e30", "--training.max_norm", "inf"});
  const test::LogCapture log;
  EXPECT_THROW(run(job.config(overrides)), UserError);
  const auto steps = checkpoint::list_steps(job.folder.path() / "run/checkpoint");
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[1].step, 1);
  EXPECT_NE(log.text().find("go back with checkpoint.load_step"), std::string::npos);
}

TEST(Run, ANonFiniteStepIsSkippedIfTheJobSaysSo) {
  const GoldenJob job("hf_base", batches());
  auto overrides = kExploding;
  overrides.insert(overrides.end(), {"--training.nonfinite", "skip", "--training.steps", "6",
                                     "--checkpoint.enable", "false"});
  EXPECT_EQ(run(job.config(overrides)), train::Outcome::kFinished);
  const auto metrics = job.metrics();
  ASSERT_EQ(metrics.size(), 6u);  // each line is valid JSON
  EXPECT_TRUE(metrics[5].value("skipped", false));
  EXPECT_TRUE(metrics[5]["loss"].is_string() || metrics[5]["grad_norm"].is_string());
}

TEST(Run, TimeLimitSavesAndStops) {
  const GoldenJob job("hf_base", batches());
  EXPECT_EQ(run(job.config({"--training.max_minutes", "1e-9"})), train::Outcome::kStopped);
  EXPECT_EQ(job.metrics().size(), 1u);
  EXPECT_TRUE(fs::exists(job.folder.path() / "run/checkpoint/step-1/manifest.json"));
}

TEST(Run, TheRunFolderHoldsTheResolvedJob) {
  const GoldenJob job("hf_base", batches());
  const auto config = job.config({"--training.steps", "1", "--optimizer.lr", "0.5"});
  run(config);
  const auto loaded = load_job((job.folder.path() / "run/job.toml").string());
  EXPECT_EQ(loaded.optimizer.lr, 0.5);
  EXPECT_EQ(to_toml(loaded), to_toml(config));
}

TEST(Run, UnfitDataIsNamed) {
  const GoldenJob job("hf_base", batches());
  write_text(job.folder.path() / "rows.jsonl", "{\"input_ids\": [1, 2, 3]}\n");
  try {
    run(job.config());
    FAIL() << "no error";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("rows.jsonl:1"), std::string::npos) << error.what();
  }
}

TEST(Run, AWarmupOfTheIndexerMovesOnlyTheIndexer) {
  const GoldenJob job("hf_base", batches());
  run(job.config(
      {"--training.steps", "2", "--dsa.stage", "dense_warmup", "--debug.dump_steps", "2"}));
  const auto before = load_golden("hf_base/checkpoint/model.safetensors");
  const auto dump = checkpoint::load_safetensors(job.folder.path() / "run/dump/step-2.safetensors");
  for (const auto& [name, tensor] : before) {
    const bool indexer = name.find(".indexer.") != std::string::npos;
    EXPECT_EQ(at::equal(dump.at("param." + name), tensor), !indexer) << name;
    EXPECT_EQ(dump.count("grad." + name) == 1, indexer) << name;
  }
}

}  // namespace
}  // namespace longhaul::testing
