// A run that stops and goes on is the same run, bit for bit.
#include <fmt/format.h>

#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/manifest.h"
#include "longhaul/parallel/parallel_dims.h"
#include "longhaul/train/resolve_model.h"
#include "longhaul/train/trainer.h"
#include "tests/support/log_capture.h"
#include "tests/support/temp_folder.h"
#include "tests/train/job_fixture.h"

namespace longhaul::testing {
namespace {

using Overrides = std::vector<std::string>;

constexpr const char* kNorm = "model.norm.weight";

// The figures of a run that do not depend on the clock.
std::vector<std::string> figures(const std::vector<nlohmann::json>& metrics) {
  std::vector<std::string> lines;
  for (auto object : metrics) {
    for (const char* key :
         {"tokens_per_second", "mfu", "memory_peak_bytes", "time", "seconds", "memory"}) {
      object.erase(key);
    }
    lines.push_back(object.dump());
  }
  return lines;
}

const at::Tensor& batches() {
  static const at::Tensor loaded = load_golden("hf_base/train20.safetensors").at("batches");
  return loaded;
}

void expect_equal_state(const fs::path& a, const fs::path& b) {
  const auto x = checkpoint::load(a), y = checkpoint::load(b);
  ASSERT_EQ(x.tensors.size(), y.tensors.size());
  for (const auto& [name, tensor] : x.tensors) {
    ASSERT_TRUE(y.tensors.count(name)) << name;
    EXPECT_TRUE(at::equal(tensor, y.tensors.at(name))) << name;
  }
  for (const char* key : {"step", "rows", "tokens", "seed", "optimizer_steps"}) {
    EXPECT_EQ(x.trainer[key], y.trainer[key]) << key;
  }
}

// Everything that moves: decay of the learning rate, router bias, warm-up, MTP off, indexer on.
const Overrides kMoving = {"--lr_scheduler.warmup_steps",       "3",
                           "--lr_scheduler.min_lr_factor",      "0.1",
                           "--checkpoint.last_save_model_only", "false"};

Overrides with(Overrides base, const Overrides& more) {
  base.insert(base.end(), more.begin(), more.end());
  return base;
}

TEST(Resume, TwentyStepsEqualTwelveStopsAndEight) {
  const GoldenJob whole("hf_base", batches()), parts("hf_base", batches());
  run(whole.config(kMoving));

  // Twelve runs that stop after a step each, then the rest in one.
  auto short_of_time = kMoving;
  short_of_time.insert(short_of_time.end(), {"--training.max_minutes", "1e-9"});
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(run(parts.config(short_of_time)), train::Outcome::kStopped);
  }
  // A torn last line, as a crash would leave it.
  std::ofstream(parts.folder.path() / "run/metrics.jsonl", std::ios::app) << "{\"step\": 99, \"lo";

  EXPECT_EQ(run(parts.config(kMoving)), train::Outcome::kFinished);
  EXPECT_EQ(figures(parts.metrics()), figures(whole.metrics()));
  expect_equal_state(whole.folder.path() / "run/checkpoint/step-20",
                     parts.folder.path() / "run/checkpoint/step-20");
}

TEST(Resume, TheSameRunTwiceIsBitEqual) {
  const GoldenJob a("hf_base", batches()), b("hf_base", batches());
  run(a.config(kMoving));
  run(b.config(kMoving));
  EXPECT_EQ(figures(a.metrics()), figures(b.metrics()));
}

TEST(Resume, ValidationLeavesTheTrajectoryAlone) {
  const GoldenJob plain("hf_base", batches()), validated("hf_base", batches());
  run(plain.config(kMoving));
  run(validated.config(
      with(kMoving, {"--validation.enable", "true", "--validation.dataset", "tokenized",
                     "--validation.dataset_path", (validated.folder.path() / "rows.jsonl").string(),
                     "--validation.seq_len", "48", "--validation.freq", "3"})));
  auto metrics = validated.metrics();
  int with_validation = 0;
  for (auto& object : metrics) {
    with_validation += static_cast<int>(object.contains("validation_loss"));
    object.erase("validation_loss");
  }
  EXPECT_EQ(with_validation, 8);  // step 1, every third, and the last
  EXPECT_EQ(figures(metrics), figures(plain.metrics()));
}

TEST(Resume, AFinishedRunHasNothingToDo) {
  const GoldenJob job("hf_base", batches());
  const Overrides short_run = {"--training.steps", "2"};
  EXPECT_EQ(run(job.config(short_run)), train::Outcome::kFinished);
  const auto before = job.metrics();
  EXPECT_EQ(run(job.config(short_run)), train::Outcome::kAlreadyDone);
  EXPECT_EQ(job.metrics(), before);
}

TEST(Resume, AModelOnlyCheckpointIsNotResumedFromAndNotPurged) {
  const GoldenJob job("hf_base", batches());
  const auto folder = job.folder.path() / "run/checkpoint";
  run(job.config(
      {"--training.steps", "4", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2"}));
  EXPECT_TRUE(checkpoint::load(folder / "step-4").model_only);
  EXPECT_FALSE(fs::exists(folder / "step-1"));
  EXPECT_TRUE(fs::exists(folder / "step-2") && fs::exists(folder / "step-3"));
  // A longer job goes on from the newest full one.
  run(job.config({"--training.steps", "6", "--checkpoint.interval", "100"}));
  EXPECT_EQ(job.metrics().size(), 6u);
  EXPECT_TRUE(fs::exists(folder / "step-4"));
}

// A longer job passes the step that a shorter one has ended with.
TEST(Resume, AFullCheckpointDoesNotReplaceFinishedWeights) {
  const GoldenJob job("hf_base", batches());
  const auto folder = job.folder.path() / "run/checkpoint";
  run(job.config({"--training.steps", "4", "--checkpoint.interval", "2"}));
  const auto finished = checkpoint::load(folder / "step-4");
  ASSERT_TRUE(finished.model_only);
  const test::LogCapture log;
  run(job.config({"--training.steps", "6", "--checkpoint.interval", "2"}));
  EXPECT_FALSE(checkpoint::load(folder / "step-4").model_only);
  const auto aside = checkpoint::load(folder / "step-4.abandoned-1");
  EXPECT_TRUE(aside.model_only);
  for (const auto& [name, tensor] : finished.tensors) {
    EXPECT_TRUE(at::equal(aside.tensors.at(name), tensor)) << name;
  }
  EXPECT_NE(log.text().find("the weights that a run has ended with, is now"), std::string::npos)
      << log.text();
}

TEST(Resume, BesideModelOnlyCheckpointsTheRunBeginsAnewAndSaysSo) {
  const GoldenJob job("hf_base", batches());
  const auto folder = job.folder.path() / "run/checkpoint";
  run(job.config({"--training.steps", "1"}));
  const test::LogCapture log;
  run(job.config({"--training.steps", "2"}));
  EXPECT_NE(log.text().find("all checkpoints are model-only, so the run begins anew"),
            std::string::npos)
      << log.text();
  for (const char* step : {"step-1", "step-2"}) {
    EXPECT_TRUE(checkpoint::load(folder / step).model_only) << step;
  }
}

// What an older version allowed: a key that is gone, a value that is refused now.
TEST(Resume, ASavedJobThatIsNotValidAnyMoreIsOnlyAWarning) {
  const GoldenJob job("hf_base", batches());
  const auto folder = job.folder.path() / "run/checkpoint";
  run(job.config({"--training.steps", "2", "--checkpoint.last_save_model_only", "false"}));
  auto snapshot = checkpoint::load(folder / "step-2");
  int64_t steps = 2;
  for (const std::string change :
       {"[removed]\nkey = 1\n", "[dsa]\nstage = \"dense_warmup\"\ntrain_indexer = false\n"}) {
    snapshot.trainer["job"] = change;
    checkpoint::save(folder, snapshot);
    const test::LogCapture log;
    run(job.config({"--training.steps", std::to_string(++steps), "--checkpoint.interval", "100",
                    "--checkpoint.load_step", "2", "--checkpoint.load_only", "true"}));
    const auto metrics = train::read_metrics(job.folder.path() / "run/metrics.load_only.jsonl");
    ASSERT_FALSE(metrics.empty());
    EXPECT_EQ(metrics.back()["step"], steps);
    EXPECT_NE(log.text().find("the job that the checkpoint of step 2 was made with is not valid"),
              std::string::npos)
        << log.text();
  }
}

// Weights and router biases only: data, schedule and moments begin anew.
TEST(Resume, ANewRunStartsFromTheWeightsOfAnother) {
  const GoldenJob first("hf_base", batches()), second("hf_base", batches());
  const auto saved = first.folder.path() / "run/checkpoint/step-4";
  for (const char* model_only : {"false", "true"}) {
    fs::remove_all(first.folder.path() / "run");
    run(first.config({"--training.steps", "4", "--checkpoint.last_save_model_only", model_only}));
    fs::remove_all(second.folder.path() / "run");
    run(second.config({"--training.steps", "1", "--optimizer.lr", "1e-30",
                       "--moe.bias_update_speed", "0", "--checkpoint.initial_load_path",
                       saved.string(), "--checkpoint.initial_load_in_hf", "false",
                       "--checkpoint.last_save_model_only", "false"}));
    EXPECT_EQ(second.metrics().size(), 1u);
    const auto theirs = checkpoint::load(saved).tensors;
    const auto ours = checkpoint::load(second.folder.path() / "run/checkpoint/step-1").tensors;
    for (const auto& [name, tensor] : theirs) {
      if (name.rfind("optimizer.", 0) == 0) continue;
      EXPECT_TRUE(at::equal(tensor, ours.at(name))) << name;
    }
  }
}

// Moments and the data position of another run, but its steps are not this one's.
TEST(Resume, PartsOfAStateThatAreNotRestored) {
  const GoldenJob first("hf_base", batches()), second("hf_base", batches());
  const auto saved = first.folder.path() / "run/checkpoint/step-2";
  run(first.config({"--training.steps", "2", "--checkpoint.last_save_model_only", "false"}));
  const auto trainer_of = [](const GoldenJob& job, const char* step) {
    return checkpoint::load(job.folder.path() / "run/checkpoint" / step).trainer;
  };
  const auto theirs = trainer_of(first, "step-2");
  const auto rows = theirs["rows"].get<int64_t>(), tokens = theirs["tokens"].get<int64_t>();
  ASSERT_EQ(rows, 4);
  const Overrides start = {"--checkpoint.initial_load_path",       saved.string(),
                           "--checkpoint.initial_load_in_hf",      "false",
                           "--checkpoint.initial_load_model_only", "false",
                           "--checkpoint.last_save_model_only",    "false"};
  const auto begin = [&](const std::string& excluded, const std::string& steps) {
    fs::remove_all(second.folder.path() / "run");
    run(second.config(
        with(start, {"--training.steps", steps, "--checkpoint.exclude_from_loading", excluded})));
  };
  begin("lr_scheduler,train_state", "1");
  auto ours = trainer_of(second, "step-1");
  EXPECT_EQ(ours["step"], 1);
  EXPECT_EQ(ours["tokens"], tokens / 2);
  EXPECT_EQ(ours["rows"], rows + rows / 2);
  EXPECT_EQ(ours["optimizer_steps"][kNorm], 3);
  begin("dataloader", "3");
  ours = trainer_of(second, "step-3");
  EXPECT_EQ(ours["step"], 3);
  EXPECT_EQ(ours["tokens"], tokens + tokens / 2);
  EXPECT_EQ(ours["rows"], rows / 2);
  EXPECT_EQ(ours["optimizer_steps"][kNorm], 3);
  begin("optimizer", "3");
  ours = trainer_of(second, "step-3");
  EXPECT_EQ(ours["rows"], rows + rows / 2);
  EXPECT_EQ(ours["optimizer_steps"][kNorm], 1);
}

// The same command once more: the parts are the run's own by then.
TEST(Resume, PartsAreLeftOutOfAnotherRunsStateOnly) {
  const GoldenJob first("hf_base", batches());
  const auto saved = first.folder.path() / "run/checkpoint/step-2";
  run(first.config({"--training.steps", "2", "--checkpoint.last_save_model_only", "false"}));
  struct Case {
    const char* excluded;
    int step, rows, updates;  // after one step and one more after a restart
  };
  for (const auto& [excluded, step, rows, updates] :
       {Case{"optimizer", 4, 8, 2}, Case{"dataloader", 4, 4, 4},
        Case{"lr_scheduler,train_state", 2, 8, 4}}) {
    SCOPED_TRACE(excluded);
    const GoldenJob second("hf_base", batches());
    const auto train_to = [&](int last) {
      const test::LogCapture log;
      run(second.config({"--training.steps", std::to_string(last), "--checkpoint.initial_load_path",
                         saved.string(), "--checkpoint.initial_load_in_hf", "false",
                         "--checkpoint.initial_load_model_only", "false",
                         "--checkpoint.last_save_model_only", "false",
                         "--checkpoint.exclude_from_loading", excluded}));
      return log.text();
    };
    const char* followed = "checkpoint.exclude_from_loading was followed before";
    EXPECT_EQ(train_to(step - 1).find(followed), std::string::npos);
    const std::string log = train_to(step);
    EXPECT_NE(log.find(followed), std::string::npos) << log;
    const auto trainer =
        checkpoint::load(second.folder.path() / fmt::format("run/checkpoint/step-{}", step))
            .trainer;
    EXPECT_EQ(trainer["step"], step);
    EXPECT_EQ(trainer["rows"], rows);
    EXPECT_EQ(trainer["optimizer_steps"][kNorm], updates);
  }
}

std::string error_of_run(const JobConfig& config) {
  try {
    run(config);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Resume, PartsThatCannotBeLeftOutAreNamed) {
  const GoldenJob job("hf_base", batches());
  run(job.config({"--training.steps", "1", "--checkpoint.last_save_model_only", "false"}));
  const auto error_without = [&](const char* parts) {
    return error_of_run(
        job.config({"--training.steps", "2", "--checkpoint.exclude_from_loading", parts}));
  };
  const auto expect_says = [&](const char* parts, const std::string& says) {
    const std::string error = error_without(parts);
    EXPECT_NE(error.find("checkpoint.exclude_from_loading"), std::string::npos) << error;
    EXPECT_NE(error.find(says), std::string::npos) << error;
  };
  expect_says("lr_scheduler,train_state", "leave train_state out");
  expect_says("lr_scheduler", "name both lr_scheduler and train_state, or neither");
  expect_says("train_state", "name both lr_scheduler and train_state, or neither");
  expect_says("data_loader", "'data_loader' is no part of a state, did you mean 'dataloader'?");
}

// The lowest bit of a moment is flipped: only a comparison with the checksums would show it.
TEST(Resume, ChecksumsAreComparedUnlessTheJobSaysNo) {
  const GoldenJob job("hf_base", batches());
  const auto folder = job.folder.path() / "run/checkpoint";
  run(job.config({"--training.steps", "2", "--checkpoint.interval", "1",
                  "--checkpoint.last_save_model_only", "false"}));
  const auto moment =
      checkpoint::read_manifest(folder / "step-2").tensors.at("optimizer.exp_avg.lm_head.weight");
  test::flip_byte(folder / "step-2" / moment.extent.file, static_cast<size_t>(moment.extent.begin));
  const Overrides no_check = {"--checkpoint.verify_on_load", "false"};
  EXPECT_EQ(run(job.config(with(no_check, {"--training.steps", "2"}))),
            train::Outcome::kAlreadyDone);
  const auto start_of = [&](const Overrides& words) {
    const test::LogCapture log;
    run(job.config(with(words, {"--training.steps", "3", "--checkpoint.load_only", "true"})));
    const std::string text = log.text();
    const size_t at = text.find("resumed from ");
    return at == std::string::npos ? text : text.substr(at, text.find('\n', at) - at);
  };
  EXPECT_EQ(start_of(no_check), "resumed from " + (folder / "step-2").string());
  EXPECT_EQ(start_of({}), "resumed from " + (folder / "step-1").string());
}

// As a save leaves it that dies where a folder is replaced in two moves. A run that only looks
// changes nothing.
TEST(Resume, AStepThatWasMovedAsideIsGoneOnFrom) {
  const GoldenJob job("hf_base", batches());
  const auto folder = job.folder.path() / "run/checkpoint";
  run(job.config({"--training.steps", "1", "--checkpoint.last_save_model_only", "false"}));
  const fs::path aside = folder / ".step-1.tmp-99999999-old";
  fs::rename(folder / "step-1", aside);
  run(job.config({"--training.steps", "2", "--checkpoint.load_only", "true"}));
  EXPECT_TRUE(fs::exists(aside));
  const test::LogCapture log;
  run(job.config({"--training.steps", "2"}));
  EXPECT_NE(log.text().find("resumed from " + (folder / "step-1").string()), std::string::npos)
      << log.text();
  EXPECT_FALSE(fs::exists(aside));
}

// A copy is not the step that its name says.
TEST(Resume, ACopyUnderALaterNameDoesNotEndTheRun) {
  const GoldenJob job("hf_base", batches());
  const auto folder = job.folder.path() / "run/checkpoint";
  run(job.config({"--training.steps", "1", "--checkpoint.last_save_model_only", "false"}));
  fs::copy(folder / "step-1", folder / "step-10000", fs::copy_options::recursive);
  const test::LogCapture log;
  EXPECT_EQ(run(job.config({"--training.steps", "2"})), train::Outcome::kFinished);
  EXPECT_NE(log.text().find("step-10000 is passed over: its manifest says step 1"),
            std::string::npos)
      << log.text();
  EXPECT_EQ(job.metrics().size(), 2u);
}

TEST(Resume, TheFirstStepIsSavedIfAsked) {
  for (const bool asked : {false, true}) {
    const GoldenJob job("hf_base", batches());
    run(job.config({"--training.steps", "3", "--checkpoint.enable_first_step_checkpoint",
                    asked ? "true" : "false"}));
    const auto folder = job.folder.path() / "run/checkpoint";
    EXPECT_EQ(fs::exists(folder / "step-1"), asked);
    EXPECT_FALSE(fs::exists(folder / "step-2"));
    EXPECT_TRUE(fs::exists(folder / "step-3"));
    if (asked) {
      EXPECT_FALSE(checkpoint::load(folder / "step-1").model_only);
    }
  }
}

TEST(Resume, EveryWayOfSavingLeavesTheSame) {
  const GoldenJob at_once("hf_base", batches());
  const Overrides words = with(kMoving, {"--training.steps", "4", "--checkpoint.interval", "1"});
  run(at_once.config(words));
  for (const char* mode : {"async", "async_with_pinned_mem"}) {
    const GoldenJob behind("hf_base", batches());
    run(behind.config(with(words, {"--checkpoint.async_mode", mode})));
    for (const char* step : {"step-1", "step-3", "step-4"}) {
      expect_equal_state(at_once.folder.path() / "run/checkpoint" / step,
                         behind.folder.path() / "run/checkpoint" / step);
    }
  }
}

// The newest is damaged: the one before it is taken, and the log says why.
TEST(Resume, ANewRunStartsFromTheNewestSoundWeightsOfAFolder) {
  const GoldenJob first("hf_base", batches()), second("hf_base", batches());
  const auto folder = first.folder.path() / "run/checkpoint";
  run(first.config({"--training.steps", "4", "--checkpoint.interval", "2"}));
  const auto shard = folder / "step-4/model-00001.safetensors";
  std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('x');
  file.close();
  const Overrides start = {"--training.steps",
                           "1",
                           "--optimizer.lr",
                           "1e-30",
                           "--moe.bias_update_speed",
                           "0",
                           "--checkpoint.initial_load_path",
                           folder.string(),
                           "--checkpoint.initial_load_in_hf",
                           "false"};
  const test::LogCapture log;
  run(second.config(start));
  EXPECT_NE(log.text().find("passing over checkpoint '" + (folder / "step-4").string()),
            std::string::npos)
      << log.text();
  const auto theirs = checkpoint::load(folder / "step-2").tensors;
  for (const auto& [name, tensor] :
       checkpoint::load(second.folder.path() / "run/checkpoint/step-1").tensors) {
    EXPECT_TRUE(at::equal(tensor, theirs.at(name))) << name;
  }
  fs::remove_all(folder / "step-2");
  fs::remove_all(second.folder.path() / "run");
  EXPECT_NE(
      error_of_run(second.config(start)).find("holds no checkpoint whose weights can be read"),
      std::string::npos);
}

// A full checkpoint of step 2 that was changed.
template <typename Change>
void forge(const GoldenJob& job, Change&& change) {
  const auto folder = job.folder.path() / "run/checkpoint";
  auto snapshot = checkpoint::load(folder / "step-2");
  change(snapshot);
  checkpoint::save(folder, snapshot);
}

TEST(Resume, MomentsThatDoNotFitAreListedByName) {
  const GoldenJob job("hf_base", batches());
  run(job.config({"--training.steps", "2", "--checkpoint.last_save_model_only", "false"}));
  const std::string first = fmt::format("optimizer.exp_avg.{}", kNorm);
  const std::string second = fmt::format("optimizer.exp_avg_sq.{}", kNorm);
  forge(job, [&](auto& snapshot) {
    snapshot.tensors[first] = at::zeros({3});
    snapshot.tensors.erase(second);
  });
  const std::string error = error_of_run(job.config({"--training.steps", "3"}));
  EXPECT_NE(error.find(first + " is [3], the model wants [128]"), std::string::npos) << error;
  EXPECT_NE(error.find(second + " is missing"), std::string::npos) << error;
  EXPECT_NE(error.find("exclude_from_loading"), std::string::npos) << error;
  // Without them the run goes on.
  run(job.config({"--training.steps", "3", "--checkpoint.exclude_from_loading", "optimizer"}));
  EXPECT_EQ(job.metrics().size(), 3u);
}

TEST(Resume, MomentsThatAreAbsentOrSpareAreNamed) {
  const GoldenJob job("hf_base", batches());
  run(job.config({"--training.steps", "2", "--checkpoint.last_save_model_only", "false"}));
  forge(job, [&](auto& snapshot) {
    for (const char* kind : {"exp_avg", "exp_avg_sq"}) {
      snapshot.tensors.erase(fmt::format("optimizer.{}.{}", kind, kNorm));
    }
    snapshot.trainer["optimizer_steps"].erase(kNorm);
    snapshot.tensors["optimizer.exp_avg.of_nothing"] = at::zeros({3});
  });
  const test::LogCapture log;
  run(job.config({"--training.steps", "3"}));
  const std::string text = log.text();
  EXPECT_NE(text.find("has no moments of model.norm.weight, which start at zero"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("which are left out: optimizer.exp_avg.of_nothing"), std::string::npos);
}

// Nothing of the model may have been overwritten by then.
TEST(Resume, WhatDoesNotFitIsFoundBeforeAnythingIsOverwritten) {
  const GoldenJob job("hf_base", batches());
  run(job.config({"--training.steps", "2", "--checkpoint.last_save_model_only", "false"}));
  forge(job, [&](auto& snapshot) {
    snapshot.tensors.erase(fmt::format("optimizer.exp_avg.{}", kNorm));
  });
  const auto config = job.config();
  dtensor::World world = dtensor::World::single();
  const auto dims = parallel::ParallelDims::make(config, world);
  train::Trainer trainer(config, resolve_model(config), dims);
  const auto before = checkpoint::stage(trainer.weights(std::nullopt)).tensors;
  EXPECT_THROW(trainer.restore(job.folder.path() / "run/checkpoint/step-2"), UserError);
  for (const auto& [name, tensor] : trainer.weights(std::nullopt).tensors) {
    EXPECT_TRUE(at::equal(tensor, before.at(name))) << name;
  }
}

TEST(Resume, LoadOnlySavesNothing) {
  const GoldenJob job("hf_base", batches());
  run(job.config(
      {"--training.steps", "2", "--checkpoint.load_only", "true", "--checkpoint.interval", "1"}));
  EXPECT_FALSE(fs::exists(job.folder.path() / "run/checkpoint"));
}

TEST(Resume, LoadStepChoosesAndAMissingOneIsAnError) {
  const GoldenJob job("hf_base", batches());
  run(job.config({"--training.steps", "4", "--checkpoint.interval", "1"}));
  const Overrides back = {"--training.steps", "5", "--checkpoint.load_step", "2"};
  const test::LogCapture log;
  run(job.config(back));
  EXPECT_EQ(job.metrics().size(), 5u);
  // The same command goes back again, as the log has said.
  EXPECT_NE(log.text().find("Remove that key before the next start"), std::string::npos);
  const auto folder = job.folder.path() / "run/checkpoint";
  EXPECT_TRUE(fs::exists(folder / "step-5"));
  run(job.config(back));
  EXPECT_TRUE(fs::exists(folder / "step-5.abandoned-1"));
  try {
    run(job.config({"--checkpoint.load_step", "17"}));
    FAIL() << "no error";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("17"), std::string::npos) << error.what();
  }
}

// A run that cannot start has left nothing behind it yet.
TEST(Resume, LoadStepSetsNothingAsideForAJobThatDoesNotFit) {
  const GoldenJob job("hf_base", batches());
  const auto folder = job.folder.path() / "run/checkpoint";
  run(job.config({"--training.steps", "4", "--checkpoint.interval", "2"}));
  const Overrides back = {"--training.steps", "5", "--checkpoint.load_step", "2"};
  for (const Overrides& misfit :
       {Overrides{"--mtp.num_modules", "1"},
        Overrides{"--checkpoint.exclude_from_loading", "lr_scheduler,train_state"}}) {
    EXPECT_NE(error_of_run(job.config(with(back, misfit))), "no error");
    EXPECT_TRUE(fs::exists(folder / "step-4"));
    EXPECT_FALSE(fs::exists(folder / "step-4.abandoned-1"));
  }
  run(job.config(back));
  EXPECT_TRUE(fs::exists(folder / "step-4.abandoned-1"));
}

}  // namespace
}  // namespace longhaul::testing
