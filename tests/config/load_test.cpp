// Job files and command lines as users write them, right and wrong: the values that come out and
// the exact line of each error.
#include "longhaul/config/load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "longhaul/base/error.h"
#include "longhaul/config/option.h"
#include "longhaul/config/write.h"
#include "tests/support/source_folder.h"

namespace longhaul {
namespace {

JobConfig job(const std::string& text, const Strings& words = {}) {
  return parse_job(text, "job.toml", words);
}

std::string error_of(const std::string& text, const Strings& words = {}) {
  try {
    job(text, words);
  } catch (const UserError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Load, AMixtureIsAListOfTables) {
  const JobConfig config =
      job("[training]\ndataset = \"files\"\n[[training.mix]]\npath = \"a,b\"\nweight = 3\n"
          "[[training.mix]]\npath = \"c\"\n");
  EXPECT_EQ(config.training.mix, (Mix{{"a,b", 3.0}, {"c", 1.0}}));
  EXPECT_EQ(config.origin_of("training.mix").text(), "job.toml:3");
  EXPECT_EQ(job(to_toml(config)).training.mix, config.training.mix);
  // The default dataset is another one; what mixes files reads files.
  EXPECT_EQ(job("[[training.mix]]\npath = \"a\"\n").training.dataset, "files");
  EXPECT_EQ(
      job("[training]\ndataset = \"files\"\n", {"--training.mix", "[{path = \"x\", weight = 0.5}]"})
          .training.mix,
      (Mix{{"x", 0.5}}));
}

TEST(Load, WrongMixtures) {
  const std::string head = "[training]\n";
  EXPECT_EQ(error_of(head + "mix = [{ path = \"a\", weight = 0 }]\n"),
            "job.toml:2: training.mix: the weight of \"a\" is 0.0, expected a number above 0");
  EXPECT_EQ(error_of(head + "mix = [{ weight = 2 }]\n"),
            "job.toml:2: training.mix: a part has no path");
  EXPECT_EQ(error_of(head + "mix = [{ path = \"a\", wieght = 2 }]\n"),
            "job.toml:2: training.mix: unknown key 'wieght', did you mean 'weight'?");
  EXPECT_EQ(error_of(head + "mix = [\"a\"]\n"),
            "job.toml:2: training.mix: expected a list of tables with path and weight, got the "
            "string \"a\"");
  EXPECT_EQ(error_of(head + "mix = [{ path = \"a\" }]\ndataset_path = \"b\"\n"),
            "job.toml:3: training.dataset_path: training.mix names the corpora; remove one of the "
            "two");
}

TEST(Load, TorchTitansDatasetsAreFilesWhereThePathSaysSo) {
  for (const char* name : {"c4", "c4_test", "enwiki-eod", "text"}) {
    const std::string text = std::string("[training]\ndataset = \"") + name + "\"\n";
    EXPECT_EQ(job(text + "dataset_path = \"x\"\n").training.dataset, "files");
  }
  EXPECT_EQ(job("[training]\ndataset = \"c4\"\n").training.dataset, "c4");
}

TEST(Load, ASplitHoldsOutOfTheTrainingData) {
  const std::string data = "[training]\ndataset = \"files\"\ndataset_path = \"x\"\n";
  const std::string split = "[validation]\nenable = true\nsplit = 0.1\n";
  EXPECT_EQ(job(data + split).validation.dataset, "files");
  EXPECT_EQ(error_of(data + split + "dataset_path = \"y\"\n"),
            "job.toml:6: validation.split: takes documents of the training corpus, and "
            "validation.dataset_path names another one; remove one of the two");
  EXPECT_EQ(error_of(data + "packing = \"best_fit\"\ndocument_mask = false\n"),
            "job.toml:4: training.packing: \"best_fit\" packs whole documents that do not see one "
            "another; set training.document_mask = true");
}

TEST(Load, DefaultsAreTorchTitans) {
  const JobConfig config = load_job("");
  EXPECT_EQ(config.model.name, "llama3");
  EXPECT_EQ(config.training.steps, 10000);
  EXPECT_EQ(config.optimizer.lr, 8e-4);
  EXPECT_EQ(config.parallelism.data_parallel_shard_degree, -1);
  EXPECT_EQ(config.activation_checkpoint.mode, "selective");
  EXPECT_EQ(config.compile.components, (Strings{"model", "loss"}));
  EXPECT_FALSE(config.lr_scheduler.decay_ratio.has_value());
  EXPECT_EQ(config.origin_of("training.steps").text(), "default");
  EXPECT_GT(options().size(), 160u);
}

TEST(Load, ValuesAndOriginsFromAFile) {
  const JobConfig config =
      job("[training]\n"
          "steps = 10_000\n"
          "max_norm = 2\n"
          "norm_type = inf\n"
          "[training.dataloader]\n"
          "num_workers = 3\n"
          "[quantize.linear.float8]\n"
          "filter_fqns = [\"output\", \"router.gate\"]\n"
          "[quantize.grouped_mm.mx]\n"
          "fqns = \"experts, shared\"\n"
          "[parallelism]\n"
          "module_fqns_per_model_part = [[\"a\", \"b\"], [\"c\"]]\n"
          "[debug]\n"
          "dump_steps = [1, 5]\n");
  EXPECT_EQ(config.training.steps, 10000);
  EXPECT_EQ(config.training.max_norm, 2.0);
  EXPECT_TRUE(std::isinf(config.training.norm_type));
  EXPECT_EQ(config.training.dataloader.num_workers, 3);
  EXPECT_EQ(config.validation.dataloader.num_workers, 0);
  EXPECT_EQ(config.quantize.linear.float8.filter_fqns, (Strings{"output", "router.gate"}));
  EXPECT_EQ(config.quantize.grouped_mm.mx.fqns, (Strings{"experts", "shared"}));
  EXPECT_EQ(config.parallelism.module_fqns_per_model_part, (StringLists{{"a", "b"}, {"c"}}));
  EXPECT_EQ(config.debug.dump_steps, (Integers{1, 5}));
  EXPECT_EQ(config.origin_of("training.dataloader.num_workers").text(), "job.toml:6");
}

TEST(Load, OverridesInEverySpelling) {
  const JobConfig config = job("[training]\nsteps = 5\n[checkpoint]\nload_only = true\n",
                               {"--training.steps",
                                "100",
                                "--optimizer.lr=1e-4",
                                "--checkpoint.load_only",
                                "false",
                                "--training.local-batch-size",
                                "2",
                                "--metrics.log_freq",
                                "1_000",
                                "--checkpoint.enable",
                                "--training.no_document_mask",
                                "--checkpoint.no-last-save-model-only",
                                "--optimizer.no_decay",
                                "*norm*, embed",
                                "--debug.dump_steps",
                                "[1, 2]",
                                "--compile.components=[\"loss\"]",
                                "--training.max_norm",
                                "inf",
                                "--checkpoint.load_step",
                                "-1"});
  EXPECT_EQ(config.training.steps, 100);
  EXPECT_EQ(config.optimizer.lr, 1e-4);
  EXPECT_FALSE(config.checkpoint.load_only);
  EXPECT_EQ(config.training.local_batch_size, 2);
  EXPECT_EQ(config.metrics.log_freq, 1000);
  EXPECT_TRUE(config.checkpoint.enable);
  EXPECT_FALSE(config.training.document_mask);
  EXPECT_FALSE(config.checkpoint.last_save_model_only);
  EXPECT_EQ(config.optimizer.no_decay, (Strings{"*norm*", "embed"}));
  EXPECT_EQ(config.debug.dump_steps, (Integers{1, 2}));
  EXPECT_EQ(config.compile.components, (Strings{"loss"}));
  EXPECT_TRUE(std::isinf(config.training.max_norm));
  EXPECT_EQ(config.checkpoint.load_step, -1);
  EXPECT_EQ(config.origin_of("training.steps").text(), "command line");
}

TEST(Load, TheLaterOverrideHoldsAndNoneClears) {
  const JobConfig config =
      job("[lr_scheduler]\ndecay_ratio = 0.5\n",
          {"--training.steps", "1", "--training.steps=2", "--lr_scheduler.decay_ratio", "None"});
  EXPECT_EQ(config.training.steps, 2);
  EXPECT_FALSE(config.lr_scheduler.decay_ratio.has_value());
}

TEST(Load, AliasesMeanTheSame) {
  EXPECT_EQ(job("[training]\nnum_mtp_modules = 2\n").mtp.num_modules, 2);
  EXPECT_EQ(error_of("[training]\nnum_mtp_modules = 2\n[mtp]\nnum_modules = 1\n"),
            "job.toml:4: mtp.num_modules is the same as training.num_mtp_modules, which job.toml:2 "
            "already gives; remove one");
  EXPECT_EQ(job("[training]\ndataset = \"text\"\ndataset_path = \"x\"\n").training.dataset,
            "files");
  EXPECT_EQ(job("[model]\ntokenizer_path = \"./old\"\n").model.hf_assets_path, "./old");
}

struct BadFile {
  const char* text;
  const char* message;
};

TEST(Load, ErrorsInAFile) {
  const BadFile cases[] = {
      {"[training]\nseqlen = 5\n",
       "job.toml:2: training.seqlen: unknown key, did you mean 'training.seq_len'?"},
      {"[trainig]\nsteps = 5\n",
       "job.toml:1: [trainig]: unknown section, did you mean 'training'?"},
      {"steps = 5\n", "job.toml:1: steps: unknown key, did you mean 'training.steps'?"},
      {"[training]\nlr = 5\n",
       "job.toml:2: training.lr: unknown key, did you mean 'optimizer.lr'?"},
      {"[training]\nwombats_here = 5\n",
       "job.toml:2: training.wombats_here: unknown key; `longhaul config keys` lists them all"},
      {"[training]\nsteps = \"100\"\n",
       "job.toml:2: training.steps: expected an integer, got the string \"100\""},
      {"[training]\nsteps = 100.0\n",
       "job.toml:2: training.steps: expected an integer, got the float 100.0"},
      {"[optimizer]\nlr = true\n", "job.toml:2: optimizer.lr: expected a number, got true"},
      {"[checkpoint]\nenable = 1\n",
       "job.toml:2: checkpoint.enable: expected true or false, got the integer 1"},
      {"[model]\nname = 3\n",
       "job.toml:2: model.name: expected a string in quotes, got the integer 3"},
      {"[model]\nconverters = [1]\n",
       "job.toml:2: model.converters: expected a list of strings, got the integer 1"},
      {"[job]\ndescription = 2024-01-01\n",
       "job.toml:2: job.description: expected a string in quotes, got a date or time"},
      {"[training.steps]\nx = 1\n", "job.toml:1: training.steps: expected an integer, got a table"},
      {"training = 3\n", "job.toml:1: training: expected a section, got the integer 3"},
      {"[training]\nseq_len = 0\n",
       "job.toml:2: training.seq_len: 0 is out of range, expected >= 1"},
      {"[optimizer]\nbeta2 = 1\n",
       "job.toml:2: optimizer.beta2: 1.0 is out of range, expected 0 to below 1"},
      {"[optimizer]\nlr = nan\n", "job.toml:2: optimizer.lr: nan is out of range, expected >= 0"},
      {"[training]\nmax_norm = 0\n",
       "job.toml:2: training.max_norm: 0.0 is out of range, expected > 0 or inf"},
      {"[parallelism]\ndata_parallel_shard_degree = 0\n",
       "job.toml:2: parallelism.data_parallel_shard_degree: 0 is out of range, expected -1 or >= "
       "1"},
      {"[lr_scheduler]\n\ndecay_type = \"cosin\"\n",
       "job.toml:3: lr_scheduler.decay_type: \"cosin\" is not one of linear, sqrt, cosine, did you "
       "mean 'cosine'?"},
      {"[compile]\ncomponents = [\"model\", \"lost\"]\n",
       "job.toml:2: compile.components: \"lost\" is not one of model, loss, did you mean 'loss'?"},
      {"[model]\nconverters = [\"npu_dsa\", \"npu_rmsnorm\"]\n",
       "job.toml:2: model.converters: unknown converter 'npu_rmsnorm', did you mean "
       "'npu_rms_norm'?"},
      {"[training]\nlocal_batch_size = 4\nglobal_batch_size = 6\n",
       "job.toml:3: training.global_batch_size: 6 is not a multiple of training.local_batch_size "
       "4"},
      {"[checkpoint]\nenable = true\ninitial_load_in_hf = true\ninitial_load_model_only = false\n",
       "job.toml:4: checkpoint.initial_load_model_only: must be true with initial_load_in_hf: a "
       "Hugging Face folder holds only weights"},
      {"[checkpoint]\nenable = true\nexport_dtype = \"float8_e4m3fn\"\n",
       "job.toml:3: checkpoint.export_dtype: float8_e4m3fn needs checkpoint.last_save_in_hf = "
       "true: "
       "only a Hugging Face folder can be FP8, a step-N never is; for that take bfloat16"},
      {"[training]\ndataset = \"files\"\n",
       "job.toml:2: training.dataset: \"files\" needs training.dataset_path, the files or folder "
       "to "
       "read"},
      {"[job]\ndescription = \"caf\xe9\"\n",
       "job.toml:2: the file is not UTF-8 text (byte 0xe9); save it as UTF-8"},
  };
  for (const auto& bad : cases) EXPECT_EQ(error_of(bad.text), bad.message) << bad.text;
}

TEST(Load, ErrorsOfActivationCheckpointing) {
  const auto option = [](const std::string& value, const std::string& mode = "selective") {
    return error_of("[activation_checkpoint]\nmode = \"" + mode + "\"\nselective_ac_option = \"" +
                    value + "\"\n");
  };
  for (const std::string value :
       {"0", "x", "-1", "", "2.5", "2x", " 2", "Op", "99999999999999999999"}) {
    EXPECT_EQ(option(value),
              "job.toml:3: activation_checkpoint.selective_ac_option: \"" + value +
                  "\" is neither \"op\" nor a number n of at least 1, which recomputes every n-th "
                  "block; to recompute none or all set activation_checkpoint.mode to \"none\" or "
                  "\"full\"");
    EXPECT_EQ(option(value, "full"), "no error") << "nobody reads it";
  }
  for (const std::string value : {"op", "1", "2", "61"}) EXPECT_EQ(option(value), "no error");
  EXPECT_EQ(error_of("[activation_checkpoint]\nop_sac_save_list = [\"linear\", \"all_to_al\"]\n"),
            "job.toml:2: activation_checkpoint.op_sac_save_list: \"all_to_al\" is not one of "
            "linear, linear_by_head, grouped_matmul, flash_attention, sparse_flash_attention, "
            "all_to_all, all_gather, reduce_scatter, all_reduce, did you mean 'all_to_all'?");
}

TEST(Load, BrokenTomlNamesTheLine) {
  for (const char* text :
       {"[training]\nsteps = \n", "[training\nsteps = 1\n", "[training]\nsteps 5\n"}) {
    const std::string message = error_of(text);
    EXPECT_TRUE(message.starts_with("job.toml:")) << message;
    EXPECT_NE(message.find(": broken TOML: "), std::string::npos) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

TEST(Load, HeadersWithoutAName) {
  EXPECT_EQ(error_of("[training]\nsteps = 1\n[#]\n"), "job.toml:3: broken TOML: not a key");
  EXPECT_EQ(error_of("[=]"), "job.toml:1: broken TOML: not a key");
}

// toml++ leaves it open whether these are white space.
TEST(Load, LettersBeyondAscii) {
  EXPECT_TRUE(error_of("[job]\n\u00e9 = 1\n").starts_with("job.toml:2: broken TOML: "));
  EXPECT_TRUE(error_of("[job]\n\u0488 = 1\n").starts_with("job.toml:2: broken TOML: "));
  EXPECT_TRUE(error_of("[job]\n\U0001f600 = 1\n").starts_with("job.toml:2: broken TOML: "));
  // Behind a backslash the line's end goes, and the white space after it.
  EXPECT_EQ(job("[job]\ndescription = \"\"\"one \\\n  \u00e9t\u00e9\"\"\"\n").job.description,
            "one \u00e9t\u00e9");
}

TEST(Load, WhatIsGivenTwice) {
  EXPECT_EQ(error_of("[training]\nsteps = 1\nsteps = 2\n"),
            "job.toml:3: the integer 'steps' is given twice; remove one");
  EXPECT_EQ(error_of("[training]\nsteps = 1\n[debug]\n[training]\nseq_len = 2\n"),
            "job.toml:4: the table 'training' is given twice; remove one");
}

TEST(Load, ErrorsOnTheCommandLine) {
  EXPECT_EQ(error_of("", {"--training.seqlen", "5"}),
            "command line: training.seqlen: unknown key, did you mean 'training.seq_len'?");
  EXPECT_EQ(error_of("", {"--training.steps"}),
            "command line: training.steps: a value is missing after --training.steps");
  EXPECT_EQ(error_of("", {"--training.steps", "--metrics.log_freq", "1"}),
            "command line: training.steps: a value is missing after --training.steps");
  EXPECT_EQ(error_of("", {"--training.steps", "1e4"}),
            "command line: training.steps: expected an integer, got the float 10000.0");
  EXPECT_EQ(error_of("", {"--training.steps=many"}),
            "command line: training.steps: expected an integer, got the string \"many\"");
  EXPECT_EQ(error_of("", {"--checkpoint.enable=yes"}),
            "command line: checkpoint.enable: expected true or false, got the string \"yes\"");
  EXPECT_EQ(error_of("", {"--checkpoint.no_enable=true"}),
            "command line: --checkpoint.no_enable takes no value");
  EXPECT_EQ(error_of("", {"training.steps=5"}),
            "command line: what is 'training.steps=5'? Settings are written --section.key value");
  EXPECT_EQ(error_of("", {"--debug.dump_steps", "1,x"}),
            "command line: debug.dump_steps: expected a list of integers, got the string \"x\"");
  const std::string broken = error_of("", {"--debug.dump_steps", "[1,"});
  EXPECT_TRUE(broken.starts_with("command line: debug.dump_steps: [1,: broken TOML: ")) << broken;
}

// A checkpoint could not keep them: cut short, overlong, half of a surrogate pair, beyond Unicode.
TEST(Load, WordsThatAreNotUtf8) {
  for (const std::string wrong :
       {"/data/caf\xe9", "\xc3", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf0\x80\x80\xaf",
        "\xf4\x90\x80\x80", "\xff", "a,\xe9"}) {
    const auto at = std::find_if(wrong.begin(), wrong.end(), [](char c) { return c < 0; });
    const std::string says = fmt::format(
        "the value is not UTF-8 text (byte 0x{:02x}); write it in UTF-8, or rename the "
        "file that it names",
        static_cast<unsigned char>(*at));
    EXPECT_EQ(error_of("", {"--training.dataset_path", wrong}),
              "command line: training.dataset_path: " + says);
    EXPECT_EQ(error_of("", {"--job.dump-folder=" + wrong}),
              "command line: job.dump_folder: " + says);
    EXPECT_EQ(error_of("", {"--optimizer.no_decay", wrong}),
              "command line: optimizer.no_decay: " + says);
  }
  const std::string cafe =
      "/data/caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \xed\x9f\xbf \xf4\x8f\xbf\xbf";
  EXPECT_EQ(job("", {"--job.dump_folder", cafe}).job.dump_folder, cafe);
}

// Bytes cut out, doubled or replaced anywhere: a job or one line of error, nothing else.
TEST(Load, DamagedFilesGiveAJobOrOneLine) {
  std::ifstream file(test::source_folder() + "/tests/config/data/recipe_v32_671b_128die.toml");
  const std::string good{std::istreambuf_iterator<char>(file), {}};
  ASSERT_GT(good.size(), 1000u);
  std::mt19937 random(7);
  int errors = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string text = good;
    const size_t at = random() % text.size();
    const size_t length = 1 + random() % 20;
    if (round % 3 == 0) text.erase(at, length);
    if (round % 3 == 1) text.insert(at, text.substr(at / 2, length));
    if (round % 3 == 2) text[at] = static_cast<char>(random());
    const std::string message = error_of(text);
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    if (message != "no error") {
      ++errors;
      EXPECT_TRUE(message.starts_with("job.toml:") || message.starts_with("default: ")) << message;
    }
  }
  EXPECT_GT(errors, 1000);
}

class LoadFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / "longhaul_load_test";
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string load_error(const std::string& path, const Strings& words = {}) {
    try {
      load_job(path, words);
    } catch (const UserError& error) {
      return error.what();
    }
    return "no error";
  }

  std::filesystem::path folder_;
};

TEST_F(LoadFile, TheFileOfTheCommandLineCounts) {
  const std::string path = (folder_ / "job.toml").string();
  std::ofstream(path) << "[training]\nsteps = 7\n";
  EXPECT_EQ(load_job(path).training.steps, 7);
  EXPECT_EQ(load_job("", {"--job.config_file", path}).training.steps, 7);
  EXPECT_EQ(load_job(path, {"--job.config_file=" + path}).training.steps, 7);
  EXPECT_EQ(load_error(path, {"--job.config-file", "b.toml"}),
            "command line: two job files, " + path + " and b.toml; give one");
}

TEST_F(LoadFile, WhatIsNotAFile) {
  const std::string missing = (folder_ / "none.toml").string();
  EXPECT_EQ(load_error(missing).find(missing + ": there is no such job file"), 0u);
  EXPECT_EQ(load_error(folder_.string()).find(folder_.string() + ": is a folder"), 0u);
}

}  // namespace
}  // namespace longhaul
