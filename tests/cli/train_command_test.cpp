// A whole small life through the program, and what a picky user tries with settings that are fine.
#include <algorithm>
#include <cmath>
#include <thread>

#include "tests/cli/small_job.h"

namespace longhaul {
namespace {

using nlohmann::json;
using test::on_a_terminal;
using test::Program;
using test::slurp;
using test::Words;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class TrainCommand : public test::SmallJob {
 protected:
  std::string checksum_listing(const std::string& step) const {
    auto listing = json::parse(run({"checkpoint", "show", step, "--json"}).out);
    return listing["tensors"].dump();
  }
};

TEST_F(TrainCommand, WhatTrainingLeavesBehind) {
  expect_trained(train());
  const auto lines = metrics();
  ASSERT_EQ(lines.size(), 6u);
  for (size_t i = 0; i < lines.size(); ++i) {
    const json& line = lines[i];
    EXPECT_EQ(line["step"], i + 1);
    EXPECT_EQ(line["tokens"], 128 * (i + 1));
    for (const char* key : {"loss", "lm_loss", "mtp_loss", "indexer_loss", "balance_loss", "z_loss",
                            "grad_norm", "lr", "tokens_per_second", "mfu", "memory_peak_bytes"}) {
      EXPECT_TRUE(line.contains(key) && line[key].is_number()) << key;
    }
    EXPECT_EQ(line["indexer_loss_per_layer"].size(), 2u);
    const bool validated = i == 0 || i == 2 || i == 5;
    EXPECT_EQ(line.contains("validation_loss"), validated) << i;
    EXPECT_EQ(line.contains("validation_bits_per_byte"), validated) << i;
  }
  EXPECT_LT(lines[5]["loss"].get<double>(), lines[0]["loss"].get<double>());
  EXPECT_THAT(slurp(path("run/summary.md")),
              AllOf(HasSubstr("6 steps, 768 tokens"), HasSubstr("loss.svg"),
                    HasSubstr("| validation loss |"), Not(HasSubstr("Held-out"))));
  EXPECT_THAT(slurp(path("run/loss.svg")), StartsWith("<svg"));
  EXPECT_THAT(slurp(path("run/job.toml")), HasSubstr("dump_folder = \"run\""));
  for (const char* file : {"step-2/manifest.json", "step-2/optimizer-00001.safetensors",
                           "step-4/model-00001.safetensors", "step-6/model-00001.safetensors"}) {
    EXPECT_TRUE(fs::exists(path("run/checkpoint") / file)) << file;
  }
  EXPECT_FALSE(fs::exists(path("run/checkpoint/step-6/optimizer-00001.safetensors")));
}

TEST_F(TrainCommand, TheTableSaysWhoseProductsTheseAre) {
  EXPECT_THAT(train_only({"--training.steps", "1"}).err,
              HasSubstr("  matmul        fp32 by " + test::expected_fp32_kernels() + "\n"));
  EXPECT_THAT(train_only({"--training.steps", "1", "--training.dtype", "float64"}).err,
              Not(HasSubstr("matmul  ")));
}

// Of the GPU, which libtorch takes in blocks of 2 MiB, and not of the process.
TEST_F(TrainCommand, TheMemoryIsTheGpus) {
  const auto result = train_only({"--training.device", "cuda"});
  if (result.status != 0 && result.err.find("no CUDA device") != std::string::npos) {
    GTEST_SKIP() << "this machine has no CUDA device";
  }
  expect_trained(result);
  const auto bytes = metrics().back()["memory_peak_bytes"].get<int64_t>();
  EXPECT_GT(bytes, 0);
  EXPECT_EQ(bytes % (2 << 20), 0) << bytes;
}

// fp32: the fused kernels choose the same keys, and the losses agree.
TEST_F(TrainCommand, ConvertersTrainTheSameModel) {
  expect_trained(train_only());
  const auto fused =
      train_only({"--model.converters", "npu_dsa,rms_norm,npu_rope,permute,npu_gmm,cross_entropy",
                  "--job.dump_folder", "fused"});
  expect_trained(fused);
  EXPECT_THAT(fused.err, ContainsRegex("converters +cross_entropy.*, dsa .2 modules., gmm .[0-9]+ "
                                       "modules., permute .[0-9]+ modules., "
                                       "rms_norm .[0-9]+ modules., rope .4 modules. on [a-z0-9_]+ "
                                       "kernels"));
  const auto expected = metrics(), actual = metrics("fused");
  ASSERT_EQ(actual.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    for (const char* key : {"loss", "lm_loss", "indexer_loss", "grad_norm"}) {
      // The reference's KL is a difference of fp32 logarithms, good to some 1e-7.
      const double value = expected[i][key].get<double>();
      EXPECT_NEAR(actual[i][key].get<double>(), value, 1e-4 * value + 1e-7) << key;
    }
  }
}

// Every stage has fused attention in both forms; a model without an indexer too.
TEST_F(TrainCommand, ConvertersTrainTheSameModelInEveryStage) {
  for (const std::string stage : {"sparse", "dense_warmup", "off"}) {
    const auto folder = [&](const std::string& name) { return stage + "_" + name; };
    const auto run_as = [&](const std::string& name, Words words) {
      for (const auto& word : {std::string("--dsa.stage"), stage, std::string("--job.dump_folder"),
                               folder(name), std::string("--training.steps"), std::string("3")}) {
        words.push_back(word);
      }
      const auto result = train_only(words);
      expect_trained(result);
      EXPECT_THAT(result.err, Not(HasSubstr("fused kernel is not used"))) << name;
    };
    run_as("plain", {});
    const auto expected = metrics(folder("plain"));
    for (const std::string form : {"absorbed", "expanded"}) {
      run_as(form, {"--model.converters", "dsa", "--model.mla_form", form});
      const auto actual = metrics(folder(form));
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        for (const auto& [key, value] : expected[i].items()) {
          if (key != "loss" && key != "indexer_loss" && key != "grad_norm") continue;
          // fp32 sums in another order: 1e-6, which grows from step to step.
          const double x = value.get<double>();
          EXPECT_NEAR(actual[i][key].get<double>(), x, 1e-4 * x + 1e-7) << form << " " << key;
        }
      }
    }
  }
}

TEST_F(TrainCommand, ConvertersThatCannotBeApplied) {
  const auto refused = [&](const Words& more, const std::string& part) {
    Words words = {"--model.converters", "dsa"};
    words.insert(words.end(), more.begin(), more.end());
    expect_user_error(train_only(words), {"model.converters: converter 'dsa' ", part});
  };
  refused({"--training.dtype", "float64"}, "needs a compute dtype of float32 or bfloat16");
  expect_user_error(train_only({"--model.converters", "rms_norm", "--training.dtype", "float64"}),
                    {"model.converters: converter 'rms_norm' needs a compute dtype of float32"});
  expect_user_error(train_only({"--model.converters", "quantize.linear.float8"}),
                    {"quantize.* is not there in this version"});
  expect_user_error(train_only({"--model.converters", "dsa,npu_dsa"}),
                    {"converter 'npu_dsa' claims what another one in the list has already"});
  // The check without training says the same.
  expect_user_error(run({"config", "check", "job.toml", "--model.converters", "dsa",
                         "--training.dtype", "float64"}),
                    {"model.converters: converter 'dsa' needs a compute dtype of float32"});
}

TEST_F(TrainCommand, AModelThatDoesNotFitIsRefusedAtOnce) {
  expect_user_error(train_only({"--model.flavor", "671B"}),
                    {"model.flavor: 6", "take ", " TiB for weights, gradients and moments"});
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(TrainCommand, InitialWeightsThatAreNotThereAreNoticedFirst) {
  expect_user_error(
      train({"--checkpoint.initial_load_path", "nowhere", "--checkpoint.initial_load_in_hf"}),
      {"checkpoint.initial_load_path: 'nowhere' does not exist"});
  EXPECT_FALSE(fs::exists(path("run")));
}

// load_only goes back to look at something; the history of the run stays.
TEST_F(TrainCommand, LoadOnlyKeepsTheMetricsOfLaterSteps) {
  expect_trained(train());
  const auto before = slurp(path("run/metrics.jsonl"));
  expect_trained(train({"--checkpoint.load_step", "2", "--checkpoint.load_only", "--training.steps",
                        "3", "--checkpoint.last_save_model_only", "false"}));
  EXPECT_EQ(slurp(path("run/metrics.jsonl")), before);
  EXPECT_THAT(slurp(path("run/metrics.load_only.jsonl")), HasSubstr("{\"step\":3,"));
}

TEST_F(TrainCommand, TheResolvedJobGivesTheSameRun) {
  expect_trained(train({"--optimizer.lr", "2e-3", "--training.steps", "3"}));
  expect_trained(run({"train", "run/job.toml", "--job.dump_folder", "again"}));
  EXPECT_EQ(figures("again"), figures("run"));
}

TEST_F(TrainCommand, EvaluationBesideBaselines) {
  expect_trained(train());
  const auto table = run({"eval", "job.toml", "--baselines"});
  EXPECT_EQ(table.status, 0) << table.err;
  const json models = json::parse(slurp(path("run/evaluation.json")))["models"];
  ASSERT_EQ(models.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const std::string name = models[i]["name"];
    EXPECT_EQ(name, (Words{"this model", "bigram", "untrained model"})[i]);
    EXPECT_THAT(table.out, HasSubstr("\n" + name));
    EXPECT_GT(models[i]["bits_per_byte"].get<double>(), 0);
    // All over the same tokens: two batches of four rows.
    EXPECT_EQ(models[i]["tokens"], models[0]["tokens"]);
  }
  EXPECT_LE(models[0]["tokens"].get<int>(), 2 * 4 * 64);
  EXPECT_LT(models[0]["loss"].get<double>(), models[2]["loss"].get<double>());
  // The run's own last validation reads the same batches.
  EXPECT_DOUBLE_EQ(models[0]["loss"].get<double>(), metrics()[5]["validation_loss"].get<double>());
  EXPECT_THAT(slurp(path("run/summary.md")), HasSubstr("## Held-out data"));

  const auto one = run({"eval", "job.toml", "--json", "--data", "corpus/train/1.txt"});
  EXPECT_EQ(one.status, 0) << one.err;
  EXPECT_EQ(json::parse(one.out)["models"].size(), 1u);
}

TEST_F(TrainCommand, Generation) {
  expect_trained(train());
  const auto generate = [&](const Words& more) {
    Words words = {"generate", "job.toml", "--prompt", "the quick", "--max-new-tokens", "16"};
    words.insert(words.end(), more.begin(), more.end());
    const auto result = run(words);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_THAT(result.out, StartsWith("the quick"));
    EXPECT_EQ(result.out.back(), '\n');
    return result.out;
  };
  EXPECT_EQ(generate({"--temperature", "0"}), generate({"--temperature", "0"}));
  // The model has 512 ids, the tokenizer 320, and an untrained model would draw any of them.
  const auto drawn = generate({"--temperature", "2", "--seed", "5"});
  EXPECT_EQ(drawn, generate({"--temperature", "2", "--seed", "5"}));
  EXPECT_NE(drawn, generate({"--temperature", "2", "--seed", "6", "--checkpoint",
                             "run/checkpoint/step-6"}));
}

TEST_F(TrainCommand, CheckpointsFromOutside) {
  expect_trained(train());
  const auto shown = json::parse(run({"checkpoint", "show", "run/checkpoint", "--json"}).out);
  EXPECT_EQ(shown["step"], 6);
  EXPECT_EQ(shown["kind"], "model_only");
  EXPECT_EQ(run({"checkpoint", "verify", "run/checkpoint/step-4"}).status, 0);
  const auto same = run({"checkpoint", "diff", "run/checkpoint/step-4", "run/checkpoint/step-4"});
  EXPECT_EQ(same.status, 0);
  EXPECT_EQ(same.out, "no differences\n");
  const auto other = run({"checkpoint", "diff", "run/checkpoint/step-2", "run/checkpoint/step-4"});
  EXPECT_EQ(other.status, 1);
  EXPECT_THAT(other.out, HasSubstr("lm_head.weight: "));
}

TEST_F(TrainCommand, AFinishedRunSaysSoAndStaysAsItIs) {
  expect_trained(train());
  const std::string before = slurp(path("run/metrics.jsonl"));
  const auto again = train();
  EXPECT_EQ(again.status, 0);
  EXPECT_THAT(
      again.err,
      HasSubstr("nothing to do: training.steps is 6 and step 6 is already in run/checkpoint"));
  EXPECT_EQ(slurp(path("run/metrics.jsonl")), before);
}

TEST_F(TrainCommand, ALongerJobGoesOnFromTheNewestFullCheckpoint) {
  expect_trained(train({"--checkpoint.no_last_save_model_only"}));
  const std::string before = slurp(path("run/metrics.jsonl"));
  expect_trained(train({"--training.steps", "8"}));
  EXPECT_EQ(metrics().size(), 8u);
  // What was there stays byte for byte.
  EXPECT_EQ(slurp(path("run/metrics.jsonl")).substr(0, before.size()), before);
}

TEST_F(TrainCommand, SigtermSavesAndTheSameCommandGoesOn) {
  const Words job = {"--training.steps",
                     "100",
                     "--training.seq_len",
                     "16",
                     "--training.local_batch_size",
                     "1",
                     "--validation.freq",
                     "50",
                     "--checkpoint.interval",
                     "1000",
                     "--checkpoint.no_last_save_model_only"};
  Words whole = job;
  whole.insert(whole.end(), {"--job.dump_folder", "whole"});
  expect_trained(train(whole));

  Program program(train_words(job), here());
  const auto lines = [&] {
    const std::string text = slurp(path("run/metrics.jsonl"));
    return std::count(text.begin(), text.end(), '\n');
  };
  while (lines() < 3 && program.running()) std::this_thread::yield();
  program.signal(SIGTERM);
  const auto stopped = program.wait();
  ASSERT_EQ(stopped.status, 0) << stopped.err;
  const auto steps = metrics().size();
  ASSERT_LT(steps, 100u) << "the run was over before the signal came";
  EXPECT_THAT(stopped.err, HasSubstr("stopped after step " + std::to_string(steps) +
                                     " of 100; the same command goes on from here"));
  EXPECT_TRUE(fs::exists(path("run/checkpoint/step-" + std::to_string(steps))));
  EXPECT_TRUE(fs::exists(path("run/summary.md")));

  const auto resumed = train(job);
  expect_trained(resumed);
  EXPECT_THAT(resumed.err, HasSubstr("resumed from run/checkpoint/step-"));
  EXPECT_EQ(figures("run"), figures("whole"));
  EXPECT_EQ(checksum_listing("run/checkpoint/step-100"),
            checksum_listing("whole/checkpoint/step-100"));
}

TEST_F(TrainCommand, TimeLimit) {
  expect_trained(train({"--job.dump_folder", "whole"}));
  const Words job = {"--training.max_minutes", "1e-7"};
  for (int step = 1; step < 3; ++step) {
    const auto result = train(job);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_THAT(result.err, HasSubstr("stopped after step " + std::to_string(step) + " of 6"));
  }
  expect_trained(train());
  // Validation at step 1, every third and the last: the same in one go.
  EXPECT_EQ(figures("run"), figures("whole"));
}

TEST_F(TrainCommand, OverridesBeforeAndAfterTheFile) {
  expect_trained(run({"train", "--training.steps=2", "--validation.no_enable",
                      "--checkpoint.no_enable", "job.toml", "--optimizer.lr", "1e-4"}));
  ASSERT_EQ(metrics().size(), 2u);
  EXPECT_EQ(metrics()[1]["lr"], 1e-4);
}

TEST_F(TrainCommand, TypesAndForms) {
  const std::vector<Words> all = {
      {"--training.mixed_precision_param", "bfloat16", "--model.mla_form", "expanded"},
      {"--training.dtype", "float64", "--training.no_document_mask"},
      {"--dsa.stage", "dense_warmup"},
      // More rows than the corpus has, and rows longer than the corpus.
      {"--training.seq_len", "8", "--training.local_batch_size", "700"},
      {"--training.seq_len", "1500", "--training.dataset_path", "corpus/train/1.txt",
       "--training.local_batch_size", "1", "--dsa.stage", "off"}};
  std::vector<Words> commands;
  for (const auto& words : all) {
    commands.push_back({"train", "job.toml", "--validation.no_enable", "--checkpoint.no_enable",
                        "--training.steps", "2", "--job.dump_folder",
                        "out" + std::to_string(commands.size())});
    commands.back().insert(commands.back().end(), words.begin(), words.end());
  }
  const auto results = test::run_all(commands, here());
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(all[i][0] + " " + all[i][1]);
    expect_trained(results[i]);
    const auto lines = metrics("out" + std::to_string(i));
    ASSERT_EQ(lines.size(), 2u);
    EXPECT_TRUE(std::isfinite(lines[1]["loss"].get<double>()));
  }
}

// They grow with the tokens, hold at least what the backward pass needs, and less where blocks are
// computed again; what was made before the first step does not count.
TEST_F(TrainCommand, ActivationsAreWhatAStepHolds) {
  const auto activations = [&](int64_t rows, const std::string& mode) {
    const std::string run_folder = mode + std::to_string(rows);
    expect_trained(train_only({"--training.steps", "1", "--job.dump_folder", run_folder,
                               "--training.local_batch_size", std::to_string(rows),
                               "--activation_checkpoint.mode", mode}));
    return metrics(run_folder).at(0)["memory"]["activations"].get<int64_t>();
  };
  const auto of_a_token = [&](const std::string& mode) {
    return (activations(64, mode) - activations(32, mode)) / (32 * 64);
  };
  const int64_t all_kept = of_a_token("none"), computed_again = of_a_token("full");
  // The inputs of each layer's linears in fp32, of widths in the flavor's config.json: attention's,
  // then those of the MLP, or of two experts and the shared one.
  const int64_t attention = 64 + 32 + 32 + 64, mlp = 64 + 128, experts = 64 + 3 * 32;
  EXPECT_GT(all_kept, 4 * (2 * attention + mlp + experts));
  EXPECT_GT(computed_again, 4 * 2 * 64) << "the inputs of two blocks";
  EXPECT_LT(computed_again, 0.7 * static_cast<double>(all_kept));
  // The product that measures the machine takes 12 MiB.
  EXPECT_LT(activations(2, "none"), 6 << 20);
}

TEST_F(TrainCommand, TwoModulesOfMultiTokenPrediction) {
  expect_trained(train({"--mtp.num_modules", "2"}));
  for (const auto& line : metrics()) {
    EXPECT_GT(line["mtp_loss"].get<double>(), 3);
    EXPECT_NEAR(line["loss"].get<double>(),
                line["lm_loss"].get<double>() + 0.3 * line["mtp_loss"].get<double>(), 1e-2);
  }
  EXPECT_EQ(run({"eval", "job.toml", "--mtp.num_modules", "2"}).status, 0);
}

TEST_F(TrainCommand, AnArchitectureWithoutIndexerNamesWhatIsNotUsed) {
  const auto result = run({"config", "check", "job.toml", "--model.name", "deepseek_v3",
                           "--model.flavor", "debugmodel", "--dsa.hadamard"});
  EXPECT_THAT(result.out, HasSubstr("dsa.hadamard = true: not used: deepseek_v3 has no indexer"));
}

TEST_F(TrainCommand, PipedOutputHasNoEscapeCodes) {
  const auto result = train();
  EXPECT_EQ(result.err.find('\x1b'), std::string::npos);
  EXPECT_EQ(result.err.find('\r'), std::string::npos);
  EXPECT_EQ(result.out, "");
}

TEST_F(TrainCommand, ColourOnATerminalUnlessUnwanted) {
  expect_trained(train());
  const Words words = {"train", "job.toml"};
  const std::string plain = on_a_terminal(words, here({"NO_COLOR=1", "TERM=xterm"}));
  if (plain.empty()) GTEST_SKIP() << "no terminal can be opened here";
  EXPECT_THAT(plain, AllOf(HasSubstr("nothing to do"), Not(HasSubstr("\x1b"))));
  const std::string coloured = on_a_terminal(words, here({"NO_COLOR=", "TERM=xterm"}));
  EXPECT_THAT(coloured, AllOf(HasSubstr("nothing to do"), HasSubstr("\x1b[")));
  const Words never = {"train", "job.toml", "--metrics.disable_color_printing"};
  EXPECT_THAT(on_a_terminal(never, here({"NO_COLOR=", "TERM=xterm"})), Not(HasSubstr("\x1b")));
}

TEST_F(TrainCommand, ATerminalShowsAProgressLine) {
  const Words words = {"train",
                       "job.toml",
                       "--training.steps",
                       "100",
                       "--validation.no_enable",
                       "--checkpoint.no_enable",
                       "--metrics.log_freq",
                       "1000"};
  const std::string shown = on_a_terminal(words, here({"NO_COLOR=1", "TERM=xterm"}));
  if (shown.empty()) GTEST_SKIP() << "no terminal can be opened here";
  // Rewritten in place, and the log's last line takes its place.
  EXPECT_THAT(shown, ContainsRegex("\r\x1b.2Ktraining: [0-9]+ of 100 .[0-9]+%., loss [0-9.]+, "
                                   "[0-9,]+ tokens/s, [^\r\n]* left\r\x1b"));
  EXPECT_THAT(shown, ContainsRegex("left\r\x1b.2K.[0-9:]+. step 100/100"));
  EXPECT_THAT(run(words).err, Not(HasSubstr("training: ")));
  const auto colours = here({"NO_COLOR=", "TERM=xterm"});
  EXPECT_THAT(on_a_terminal(words, colours), HasSubstr("\x1b[2m"));
  Words plain = words;
  plain.push_back("--metrics.disable_color_printing");
  EXPECT_THAT(on_a_terminal(plain, colours), Not(HasSubstr("\x1b[2m")));
}

TEST_F(TrainCommand, LostOutputIsAnError) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  auto options = here();
  options.out = "/dev/full";
  for (const Words& words : {Words{"config", "show", "job.toml"}, Words{"version"}}) {
    expect_user_error(Program(words, options).wait(),
                      {"cannot write to ", "No space left on device"}, 1);
  }
}

TEST_F(TrainCommand, EveryHelpEndsWithAnExample) {
  std::vector<Words> commands = {{"train"},
                                 {"eval"},
                                 {"generate"},
                                 {"compare"},
                                 {"report"},
                                 {"tokenizer", "encode"},
                                 {"tokenizer", "decode"},
                                 {"checkpoint", "diff"},
                                 {"checkpoint", "verify"}};
  for (auto& words : commands) words.push_back("--help");
  for (const auto& result : test::run_all(commands, here())) {
    EXPECT_EQ(result.status, 0);
    const size_t example = result.out.rfind("Example:\n  ");
    ASSERT_NE(example, std::string::npos) << result.out;
    // The last paragraph is one command, or one pipe into one.
    const std::string end = result.out.substr(example);
    EXPECT_EQ(std::count(end.begin(), end.end(), '\n'), 2) << end;
  }
}

}  // namespace
}  // namespace longhaul
