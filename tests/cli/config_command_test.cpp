// The program from outside: what a user sees on the terminal, and the exit status.
#include <gtest/gtest.h>

#include "longhaul/config/write.h"
#include "tests/support/program.h"
#include "tests/support/source_folder.h"

namespace longhaul {
namespace {

using test::run_longhaul;

std::string data_file(const std::string& name) {
  return test::source_folder() + "/tests/config/data/" + name;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class ConfigCommand : public ::testing::Test {
 protected:
  test::ProgramResult run(const std::vector<std::string>& words) {
    return run_longhaul(words, folder_.path().string());
  }

  // The program with job.toml holding `text`.
  test::ProgramResult run_on(const std::string& text, std::vector<std::string> words) {
    test::spill(folder_ / "job.toml", text);
    words.insert(words.begin() + 2, "job.toml");
    return run(words);
  }

  test::TempFolder folder_;
};

TEST_F(ConfigCommand, Version) {
  const auto result = run({"version"});
  EXPECT_EQ(result.status, 0);
  for (const char* row :
       {"longhaul   0.1.0", "\nlibtorch   2.", "compiler ", "CUDA ", "threads "}) {
    EXPECT_TRUE(contains(result.out, row)) << row;
  }
  EXPECT_TRUE(contains(result.out, "\nmatmul     fp32 by " + test::expected_fp32_kernels() + "\n"))
      << result.out;
}

TEST_F(ConfigCommand, KernelsOfTheProcessorAndOfTheEnvironment) {
  EXPECT_TRUE(contains(run({"version", "--kernels"}).out, "kernels    ")) << "a choice";
  const auto named = test::shell("LONGHAUL_ISA=portable \"$LONGHAUL_BINARY\" version --kernels");
  EXPECT_TRUE(contains(named.out, "kernels    portable: LONGHAUL_ISA names it\n")) << named.out;
  EXPECT_TRUE(contains(named.out, "avx512_bf16 ")) << named.out;
  const auto wrong = test::shell("LONGHAUL_ISA=mmx \"$LONGHAUL_BINARY\" version --kernels");
  EXPECT_EQ(wrong.status, 2);
  EXPECT_TRUE(contains(wrong.err,
                       "LONGHAUL_ISA = mmx: must be avx512_bf16, avx512, avx2 or "
                       "portable"))
      << wrong.err;
}

struct Mistake {
  std::vector<std::string> words;
  std::string error;
};

TEST_F(ConfigCommand, MistakesAreOneLineAndStatusTwo) {
  const Mistake mistakes[] = {
      {{}, "error: A subcommand is required; see `longhaul --help`\n"},
      {{"confg"}, "error: unknown word 'confg', did you mean 'config'?; see `longhaul --help`\n"},
      {{"config", "chek"},
       "error: unknown word 'chek', did you mean 'check'?; see `longhaul --help`\n"},
      {{"config", "show", "none.toml"},
       "error: none.toml: there is no such job file; docs/config.md says what one holds\n"},
      {{"config", "show", "."}, "error: .: is a folder; give the job file (*.toml) inside it\n"},
      {{"config", "show", "--training.sqe_len", "5"},
       "error: command line: training.sqe_len: unknown key, did you mean 'training.seq_len'?\n"},
      {{"config", "show", "a.toml", "b.toml"},
       "error: command line: what is 'b.toml'? The job file is a.toml; settings are written "
       "--section.key value\n"},
  };
  std::vector<std::vector<std::string>> commands;
  for (const auto& mistake : mistakes) commands.push_back(mistake.words);
  const auto results =
      test::run_all(commands, {.folder = folder_.path(), .environment = {}, .out = {}, .err = {}});
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].status, 2) << mistakes[i].error;
    EXPECT_EQ(results[i].err, mistakes[i].error);
    EXPECT_EQ(results[i].out, "") << mistakes[i].error;
  }
}

TEST_F(ConfigCommand, MistakesInTheFile) {
  const std::pair<const char*, const char*> files[] = {
      {"[training]\nseqlen = 5\n",
       "error: job.toml:2: training.seqlen: unknown key, did you mean 'training.seq_len'?\n"},
      {"[training]\n\nsteps = 1.5\n",
       "error: job.toml:3: training.steps: expected an integer, got the float 1.5\n"},
      {"[dsa]\nstage = \"spars\"\n",
       "error: job.toml:2: dsa.stage: \"spars\" is not one of sparse, dense_warmup, off, did you "
       "mean 'sparse'?\n"},
      {"[model]\nconverters = [\"dsa\", \"gmn\"]\n",
       "error: job.toml:2: model.converters: unknown converter 'gmn', did you mean 'gmm'?\n"},
      {"[training\n", "error: job.toml:1: broken TOML: table header: expected ']', saw '\\n'\n"},
  };
  for (const auto& [text, error] : files) {
    const auto result = run_on(text, {"config", "show"});
    EXPECT_EQ(result.status, 2) << text;
    EXPECT_EQ(result.err, error);
  }
}

const char* const kTiny = "[model]\nname = \"deepseek_v32\"\nflavor = \"tiny\"\n";

TEST_F(ConfigCommand, ShowChangedWithOriginsAndShape) {
  const auto result = run_on(kTiny, {"config", "show", "--checkpoint.load_step", "0", "--changed",
                                     "--job.description", "check"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out.substr(0, result.out.find("\n\n")),
            "job.description      = \"check\"                       # command line\n"
            "checkpoint.load_step = 0                             # command line\n"
            "model.name           = \"deepseek_v32\"                # job.toml:2\n"
            "model.flavor         = \"tiny\"                        # job.toml:3");
  EXPECT_TRUE(
      contains(result.out, "\n# the model's shape, from flavor deepseek_v32/tiny (job.toml:3)\n"));
  EXPECT_TRUE(contains(result.out, "\nhidden_size              = 64\n")) << result.out;
}

TEST_F(ConfigCommand, CheckForRanks) {
  const char* key = "parallelism.tensor_parallel_degree";
  const std::vector<std::string> words = {"config", "check", "--parallelism.tensor_parallel_degree",
                                          "2"};
  const auto one = run_on(kTiny, words);
  EXPECT_TRUE(contains(one.out, fmt::format("{} = 2: there is one rank", key))) << one.out;
  auto on_two = words;
  on_two.insert(on_two.end(), {"--ranks", "2"});
  const auto two = run_on(kTiny, on_two);
  EXPECT_EQ(two.status, 0) << two.err;
  EXPECT_FALSE(contains(two.out, key)) << two.out;
  EXPECT_TRUE(contains(two.out, "2 ranks = ")) << two.out;
}

TEST_F(ConfigCommand, ANegativeNumberIsAValue) {
  const auto result = run_on(kTiny, {"config", "show", "--training.steps", "-1"});
  EXPECT_EQ(result.status, 2);
  EXPECT_EQ(result.err, "error: command line: training.steps: -1 is out of range, expected >= 1\n");
}

TEST_F(ConfigCommand, CheckOfTheRecipe) {
  const auto result =
      run({"config", "check", data_file("recipe_v32_671b_128die.toml"), "--ranks", "128"});
  EXPECT_EQ(result.status, 0) << result.err;
  for (const char* part :
       {"not supported yet, training would refuse:\n", "optimizer.swap_optimizer = true",
        "parallelism.pipeline_parallel_degree = 2", "paths that do not exist on this machine:\n",
        "training.dataset_path: ./assets/enwiki", "model: flavor deepseek_v32/671B_debug_128die",
        "128 ranks = dp_replicate 1 x dp_shard 1 x cp 16 x tp 4 x pp 2; experts: ",
        "the file is valid; 2 settings are not supported yet\n"}) {
    EXPECT_TRUE(contains(result.out, part)) << part << "\n" << result.out;
  }
}

TEST_F(ConfigCommand, CheckOfATorchTitanFile) {
  const auto result = run({"config", "check", data_file("torchtitan_deepseek_v3_671b.toml")});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_TRUE(contains(result.out, "training.dataset = \"c4\"")) << result.out;
  EXPECT_TRUE(contains(result.out, "notes:\n")) << result.out;
  EXPECT_TRUE(contains(result.out, "model: flavor deepseek_v3/671B")) << result.out;
}

TEST_F(ConfigCommand, CheckOfAJobThatRuns) {
  test::spill(folder_ / "data.txt", "text");
  const auto result = run_on(
      "[model]\nname = \"deepseek_v32\"\nflavor = \"tiny\"\nhf_assets_path = \".\"\n"
      "[training]\ndataset = \"files\"\ndataset_path = \"data.txt\"\n"
      "[activation_checkpoint]\nmode = \"none\"\n",
      {"config", "check"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(result.out,
            "model: flavor deepseek_v32/tiny (job.toml:3)\n"
            "job.toml: the file is valid; training would accept it\n");
}

TEST_F(ConfigCommand, CheckLooksAtEachPathOfAList) {
  for (const char* name : {"a.txt", "b.txt", "c,d.txt"}) test::spill(folder_ / name, "text");
  const auto checked = [&](const std::string& paths) {
    return run_on(std::string(kTiny) + "hf_assets_path = \".\"\n[training]\ndataset = \"files\"\n" +
                      "dataset_path = \"" + paths + "\"\n",
                  {"config", "check"})
        .out;
  };
  for (const char* there : {"a.txt", "a.txt,b.txt", "c,d.txt"}) {
    EXPECT_FALSE(contains(checked(there), "paths that do not exist")) << there;
  }
  EXPECT_TRUE(contains(checked("a.txt,gone.txt,b.txt,none"),
                       "paths that do not exist on this machine:\n"
                       "  job.toml:7: training.dataset_path: gone.txt\n"
                       "  job.toml:7: training.dataset_path: none\n"))
      << checked("a.txt,gone.txt,b.txt,none");
}

TEST_F(ConfigCommand, CheckFindsDegreesAndFlavorsThatDoNotFit) {
  const auto degrees = run_on(std::string(kTiny) + "[parallelism]\ntensor_parallel_degree = 3\n",
                              {"config", "check", "--ranks", "8"});
  EXPECT_EQ(degrees.status, 2);
  EXPECT_EQ(degrees.err,
            "error: 8 ranks = dp_replicate 1 x dp_shard -1 x cp 1 x tp 3 x pp 1: the other degrees "
            "multiply to 3, which does not divide 8\n");
  const auto flavor =
      run_on("[model]\nname = \"deepseek_v32\"\nflavor = \"tinny\"\n", {"config", "check"});
  EXPECT_EQ(flavor.status, 2);
  EXPECT_TRUE(contains(flavor.err,
                       "job.toml:3: model.flavor: deepseek_v32 has no flavor 'tinny', did you mean "
                       "'tiny'?"))
      << flavor.err;
}

TEST_F(ConfigCommand, Keys) {
  EXPECT_EQ(run({"config", "keys", "--markdown"}).out, keys_markdown());
  const auto some = run({"config", "keys", "mtp.loss_weight"});
  EXPECT_EQ(some.out,
            "mtp.loss_weight  (float, default 0.3; >= 0)\n    Weight of the depths' mean loss.\n");
}

TEST_F(ConfigCommand, EveryHelpEndsWithAnExample) {
  std::vector<std::vector<std::string>> commands = {
      {},
      {"config"},
      {"config", "show"},
      {"config", "check"},
      {"config", "keys"},
      {"checkpoint"},
      {"checkpoint", "show"},
      {"tokenizer"},
      {"tokenizer", "train"},
      {"data"},
      {"data", "prepare"},
      {"data", "inspect"},
      {"version"},
  };
  for (auto& words : commands) words.push_back("--help");
  for (const auto& result : test::run_all(commands)) {
    EXPECT_EQ(result.status, 0);
    const size_t example = result.out.rfind("Example:\n");
    ASSERT_NE(example, std::string::npos) << result.out;
    EXPECT_TRUE(result.out.substr(example).starts_with("Example:\n  ")) << result.out;
  }
}

}  // namespace
}  // namespace longhaul
