// What a user may get wrong: each time one line that names the thing and the remedy.
#include "longhaul/base/safetensors.h"
#include "tests/cli/small_job.h"
#include "tests/support/source_folder.h"

namespace longhaul {
namespace {

using test::slurp;
using test::spill;
using test::Words;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class BadInput : public test::SmallJob {
 protected:
  // Training on `data`, a place under the test's folder.
  test::ProgramResult train_on(const std::string& data, Words more = {}) const {
    more.insert(more.end(), {"--training.dataset_path", data, "--training.steps", "2"});
    return train_only(more);
  }
};

TEST_F(BadInput, CorporaThatHoldNothing) {
  fs::create_directory(path("empty"));
  fs::create_directory(path("blank"));
  spill(path("blank/a.txt"), "");
  spill(path("blank/b.txt"), "");
  const std::pair<const char*, Words> cases[] = {
      {"empty",
       {"command line: training.dataset_path: there are no files in 'empty'; give a folder with "
        "text files"}},
      {"blank", {"all 2 files of the corpus are empty"}},
      {"no/where", {"training.dataset_path: 'no/where' does not exist"}},
      {"", {"job.toml:8: training.dataset", "needs training.dataset_path"}}};
  std::vector<Words> commands;
  for (const auto& [data, parts] : cases) {
    commands.push_back(train_words({"--training.dataset_path", data, "--job.dump_folder",
                                    "out" + std::to_string(commands.size())}));
  }
  const auto results = test::run_all(commands, here());
  for (size_t i = 0; i < results.size(); ++i) {
    expect_user_error(results[i], cases[i].second);
    EXPECT_FALSE(fs::exists(path("out" + std::to_string(i) + "/metrics.jsonl")));
  }
}

TEST_F(BadInput, FilesThatCannotBeRead) {
  fs::create_symlink("/no/where", path("dead.txt"));
  expect_user_error(train_on("dead.txt"), {"'dead.txt' does not exist: it is a link to nothing"});
  fs::create_directory(path("mixed"));
  fs::create_symlink("/no/where", path("mixed/dead.txt"));
  spill(path("mixed/good.txt"), test::small_text(7));
  const auto mixed = train_on("mixed");
  expect_trained(mixed);
  EXPECT_THAT(mixed.err, HasSubstr("'mixed': 1 entries are left out, such as 'mixed/dead.txt'"));
  expect_user_error(run({"tokenizer", "encode", "--tokenizer", "tokenizer", "--jsonl", "corpus"}),
                    {"cannot read 'corpus': Is a directory"});
  if (geteuid() == 0) return;  // permissions do not bind root
  fs::permissions(path("mixed/good.txt"), fs::perms::none);
  expect_user_error(train_on("mixed"), {"cannot read 'mixed/good.txt': Permission denied"});
}

TEST_F(BadInput, TextThatIsNone) {
  spill(path("nul.txt"), std::string("a\nb\0\0c\n", 8));
  spill(path("latin1.txt"), "ab\nd\xe9j\xe0\n");
  const std::pair<const char*, const char*> files[] = {
      {"nul.txt", "nul.txt:2: a NUL byte, which no text holds (byte 3 of the file)"},
      {"latin1.txt", "latin1.txt:2: 0xE9 is not UTF-8 here (byte 4 of the file)"}};
  for (const auto& [name, error] : files) {
    expect_user_error(train_on(name), {error, "convert the file", "training.invalid_text"});
    expect_user_error(run({"tokenizer", "train", "--input", name, "--output", "t.json"}),
                      {error, "--invalid-text replace"});
    EXPECT_FALSE(fs::exists(path("t.json")));
    EXPECT_EQ(run({"tokenizer", "train", "--input", name, "--output", "t.json", "--vocab-size",
                   "300", "--invalid-text", "replace"})
                  .status,
              0);
    fs::remove(path("t.json"));
    const std::string mixed = std::string("corpus/train,") + name;
    const auto result = train_on(mixed, {"--training.invalid_text", "replace"});
    expect_trained(result);
    EXPECT_THAT(result.err, HasSubstr("1 of 26 documents hold NUL bytes or are not valid UTF-8"));
  }
}

TEST_F(BadInput, TooLittleText) {
  spill(path("one.txt"), "x");
  expect_user_error(train_on("one.txt"),
                    {"command line: training.dataset_path: 'one.txt' holds one token a document, "
                     "from which nothing can be learnt; give more text"});
  spill(path("few.txt"), "xyz");
  const auto result = train_on("few.txt");
  expect_trained(result);
  EXPECT_THAT(result.err, HasSubstr("'few.txt' holds 4 tokens, less than one sample of 64"));
}

// One line of words, and one piece without a place to cut; documents are cut at 16 MiB.
TEST_F(BadInput, AHundredMegabytesInOneLine) {
  std::string words, letters;
  while (words.size() < 60'000'000) words += "the quick model reads ";
  letters.assign(40'000'000, 'a');
  spill(path("line.txt"), words + letters);
  const auto result = train_on("line.txt");
  expect_trained(result);
  EXPECT_THAT(result.err, HasSubstr("training data: 6 documents, "));
}

TEST_F(BadInput, Tokenizers) {
  expect_user_error(train_only({"--model.hf_assets_path", "nowhere"}),
                    {"no tokenizer.json in 'nowhere'", "longhaul tokenizer train"});
  fs::create_directory(path("broken"));
  spill(path("broken/tokenizer.json"), test::small_tokenizer().substr(0, 1000));
  expect_user_error(train_only({"--model.hf_assets_path", "broken"}), {"broken/tokenizer.json"});
  std::string texts;
  for (unsigned i = 0; i < 2000; ++i) texts += std::to_string(i * i * 7919) + " ";
  spill(path("numbers.txt"), texts);
  EXPECT_EQ(run({"tokenizer", "train", "--input", "numbers.txt", "--vocab-size", "600", "--output",
                 "large/tokenizer.json"})
                .status,
            0);
  // The corpus uses none of the ids beyond 512; the mistake is found all the same.
  expect_user_error(train_only({"--model.hf_assets_path", "large"}),
                    {"the tokenizer has 600 tokens, but the model's vocabulary ends at 512"});
  expect_user_error(run({"tokenizer", "train", "--input", "numbers.txt", "--output", "corpus"}),
                    {"'corpus' is a folder; name the file"});
}

TEST_F(BadInput, TokenisedRows) {
  const auto train_on_row = [&](const std::string& row) {
    spill(path("rows.jsonl"), "{\"input_ids\": [1, 2, 3, 4]}\n" + row + "\n");
    return train_on("rows.jsonl", {"--training.dataset", "tokenized", "--training.seq_len", "4",
                                   "--model.hf_assets_path", "nowhere"});
  };
  expect_trained(train_on_row(R"({"input_ids": [1, 2, 3, 511]})"));
  const std::pair<const char*, const char*> rows[] = {
      {R"({"input_ids": [1, 2, 3]})", "rows.jsonl:2: input_ids has 3 numbers, expected 4"},
      {R"({"input_ids": [1, 2, 3, 512]})",
       "rows.jsonl:2: input_ids[3] is 512, expected an id (0 to 511)"},
      {R"({"input_ids": [1, 2.5, 3, 4]})", "rows.jsonl:2: input_ids[1] is 2.5"},
      {R"({"input_ids": [1, 2, 3, 4)", "rows.jsonl:2: not valid JSON"},
  };
  for (const auto& [row, error] : rows) expect_user_error(train_on_row(row), {error});
  spill(path("none.jsonl"), R"({"input_ids": [1, 2], "labels": [-100, -100]})");
  expect_user_error(
      train_on("none.jsonl", {"--training.dataset", "tokenized", "--training.seq_len", "2"}),
      {"training.dataset_path: 'none.jsonl' has no label that counts"});
}

// What the command line's own options get wrong is not laid on the job file before them.
TEST_F(BadInput, OptionsOfACommand) {
  const std::pair<Words, const char*> mistakes[] = {
      {{"generate", "job.toml", "--prompt", "x", "--temperature", "-1"}, "--temperature"},
      {{"generate", "job.toml", "--prompt", "x", "--max-new-tokens", "many"}, "--max-new-tokens"},
      {{"generate", "job.toml", "--prompt", "x", "--seed", "-1"}, "--seed"},
      {{"config", "check", "job.toml", "--ranks", "1.5"}, "--ranks"},
      {{"trian", "job.toml"}, "unknown word 'trian', did you mean 'train'?"}};
  for (const auto& [words, error] : mistakes) expect_user_error(run(words), {error});
}

TEST_F(BadInput, JobFiles) {
  const std::pair<Words, Words> mistakes[] = {
      {{"train"}, {"which job?", "longhaul train "}},
      {{"eval"}, {"which job?", "longhaul eval "}},
      {{"generate"}, {"which job?", "longhaul generate "}},
      {{"train", "jop.toml"}, {"jop.toml: there is no such job file"}},
      {{"train", "job.toml", "--training.stesp", "3"}, {"did you mean 'training.steps'?"}},
      {{"train", "job.toml", "--training.steps", "0"},
       {"command line: training.steps: 0 is out of range, expected >= 1"}},
      {{"train", "job.toml", "--training.global_batch_size", "3"},
       {"training.global_batch_size: 3 is not a multiple of training.local_batch_size 2"}},
      {{"train", "job.toml", "--dsa.stage", "dense_warmup", "--dsa.no_train_indexer"},
       {"dsa.train_indexer: must be true with dsa.stage = \"dense_warmup\""}},
      {{"train", "job.toml", "--dsa.stage", "dense_warmup", "--dsa.indexer_loss_coeff", "0"},
       {"dsa.indexer_loss_coeff: must be above 0", "nothing else would learn"}},
      {{"train", "job.toml", "--dsa.stage", "dense_warmup", "--model.name", "deepseek_v3"},
       {"dsa.stage", "deepseek_v3 has none"}},
      {{"train", "job.toml", "--parallelism.tensor_parallel_degree", "2"},
       {"parallelism.tensor_parallel_degree = 2", "set it to 1"}},
  };
  std::vector<Words> commands;
  for (const auto& [words, parts] : mistakes) commands.push_back(words);
  const auto results = test::run_all(commands, here());
  for (size_t i = 0; i < results.size(); ++i) expect_user_error(results[i], mistakes[i].second);
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(BadInput, TyposInTheFile) {
  const std::pair<const char*, const char*> typos[] = {
      {"[trainning]\nsteps = 3\n", "job.toml:1: [trainning]: unknown section"},
      {"[training]\nseq_length = 3\n", "job.toml:2: training.seq_length: unknown key"},
      {"[training]\nsteps = \"3\"\n", "job.toml:2: training.steps: expected an integer"},
      {"[training]\nsteps = 3\nsteps = 4\n", "job.toml:3"},
      {"training.steps == 3\n", "job.toml:1: broken TOML"},
  };
  for (const auto& [text, error] : typos) {
    spill(path("job.toml"), text);
    expect_user_error(train(), {error});
  }
}

TEST_F(BadInput, ANoDecayPatternWithoutAParameter) {
  const auto result = train_only({"--optimizer.no_decay", "*layernorm.weight,norm"});
  expect_user_error(result,
                    {"command line: optimizer.no_decay: 'norm' matches the whole name of no "
                     "parameter, did you mean '*norm*'?",
                     "lm_head.weight"});
  EXPECT_FALSE(fs::exists(path("run/metrics.jsonl")));
  expect_trained(train_only({"--optimizer.no_decay", "*norm*"}));
}

TEST_F(BadInput, ADeviceThatIsNotThere) {
  const auto result = train_only({"--training.device", "cuda"});
  if (result.status == 0) GTEST_SKIP() << "this machine has a CUDA device";
  expect_user_error(
      result, {"command line: training.device: \"cuda\"", "no CUDA device", "\"cpu\" or \"auto\""});
}

TEST_F(BadInput, MoreMemoryThanThereIs) {
  const auto result = train_only({"--training.seq_len", "300000", "--training.local_batch_size",
                                  "1", "--dsa.stage", "off"});  // a mask of S x S, at once
  expect_user_error(result, {"not enough memory", "lower training.local_batch_size"}, 1);
}

TEST_F(BadInput, RunFoldersThatCannotBeUsed) {
  spill(path("file"), "precious");
  const auto on = [&](const std::string& folder) { return train({"--job.dump_folder", folder}); };
  expect_user_error(on("file"), {"command line: job.dump_folder: ", "'file'", "Not a directory"});
  expect_user_error(on("file/below"), {"job.dump_folder", "Not a directory"});
  EXPECT_EQ(slurp(path("file")), "precious");
  expect_user_error(on(""), {"job.dump_folder: it is empty"});
  // No user may create anything there, root neither.
  const auto readonly = on("/proc/longhaul");
  expect_user_error(readonly, {"job.dump_folder: ", "'/proc/longhaul'"});
  EXPECT_THAT(readonly.err, Not(HasSubstr("tokenizing")));
  fs::create_directory(path("run"));
  spill(path("run/checkpoint"), "a file where a folder is expected");
  expect_user_error(on("run"), {"cannot read the folder 'run/checkpoint'"});
}

TEST_F(BadInput, MetricsAndEvaluationOfSomeoneElse) {
  EXPECT_EQ(train({"--training.max_minutes", "1e-7"}).status, 0);
  std::ofstream(path("run/metrics.jsonl"), std::ios::app)
      << "{\"step\": 1}\n[]\n{\"step\": \"one\", \"tokens\": 1}\nplain\n";
  spill(path("run/evaluation.json"), R"({"models": [{"loss": 1}, 3, {"name": 4}]})");
  expect_trained(train());
  EXPECT_EQ(metrics().size(), 6u);
}

TEST_F(BadInput, CommandsWithoutACheckpoint) {
  expect_user_error(run({"eval", "job.toml"}),
                    {"no checkpoint in 'run/checkpoint'", "train first"});
  expect_user_error(run({"generate", "job.toml", "--prompt", "the"}),
                    {"no checkpoint in 'run/checkpoint'"});
  expect_user_error(run({"checkpoint", "show", "none"}), {"none"});
}

// Starting from a Hugging Face folder that is not what it should be.
class BadWeights : public BadInput {
 protected:
  BadWeights() {
    const fs::path source = fs::path(test::source_folder()) / "tests/golden/hf_base/checkpoint";
    fs::copy(source, path("hf"));
    fs::permissions(path("hf/model.safetensors"), fs::perms::owner_write, fs::perm_options::add);
  }

  // Rewrites the file with `change` applied to each tensor's description and bytes.
  template <typename Change>
  void rewrite(Change&& change) {
    const fs::path file = path("hf/model.safetensors"), copy = path("hf/copy");
    std::map<std::string, std::string> contents;
    std::vector<safetensors::TensorInfo> infos;
    {
      const safetensors::Reader reader(file);
      for (auto [name, info] : reader.header().tensors) {
        const auto bytes = reader.bytes(info);
        std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        if (!change(info, text)) continue;
        contents[info.name] = text;
        infos.push_back(info);
      }
    }
    safetensors::Writer writer(copy, infos);
    for (const auto& info : writer.tensors()) {
      writer.write(info.name, contents[info.name].data(), contents[info.name].size());
    }
    writer.finish();
    fs::rename(copy, file);
  }
  void put_nan_into(const std::string& name) {
    rewrite([&](safetensors::TensorInfo& info, std::string& bytes) {
      if (info.name == name) bytes.replace(8, 4, std::string("\0\0\xc0\x7f", 4));
      return true;
    });
  }

  test::ProgramResult start_from_it(Words more = {}) const {
    std::string rows;
    for (int i = 0; i < 8; ++i) rows += "{\"input_ids\": [1, 20, 300, 4, 5, 6, 7, 8]}\n";
    spill(path("rows.jsonl"), rows);
    spill(path("hf.toml"), R"([job]
dump_folder = "run"
[model]
name = "deepseek_v32"
hf_assets_path = "hf"
[training]
dataset = "tokenized"
dataset_path = "rows.jsonl"
seq_len = 8
local_batch_size = 2
steps = 4
mixed_precision_param = "float32"
device = "cpu"
[checkpoint]
enable = true
initial_load_path = "hf"
initial_load_in_hf = true
)");
    more.insert(more.begin(), {"train", "hf.toml"});
    return run(more);
  }
};

TEST_F(BadWeights, TheFolderAsItIsTrains) { expect_trained(start_from_it()); }

TEST_F(BadWeights, MissingAndMisshapenTensors) {
  rewrite([](safetensors::TensorInfo& info, std::string&) {
    if (info.name == "model.embed_tokens.weight") info.shape = {128, 320};
    return info.name != "model.norm.weight";
  });
  expect_user_error(
      start_from_it(),
      {"hf does not fit the model", "missing: model.norm.weight",
       "model.embed_tokens.weight is [128, 320], the model wants [320, 128]", "model.flavor"});
  fs::resize_file(path("hf/model.safetensors"), 100000);
  expect_user_error(start_from_it(), {"hf/model.safetensors"});
  fs::remove(path("hf/model.safetensors"));
  expect_user_error(start_from_it(), {"'hf' holds neither model.safetensors nor"});
  EXPECT_FALSE(fs::exists(path("run/checkpoint")));
}

TEST_F(BadWeights, QuantizedTensors) {
  rewrite([](safetensors::TensorInfo& info, std::string&) {
    if (info.name == "model.norm.weight") info.dtype = safetensors::DType::kI32;
    return true;
  });
  expect_user_error(
      start_from_it(),
      {"hf: model.norm.weight is I32: of quantized weights only F8_E4M3 with scales"});
}

TEST_F(BadWeights, NanInAWeightStopsBeforeTheUpdate) {
  put_nan_into("model.layers.1.mlp.shared_experts.up_proj.weight");
  for (const char* policy : {"stop", "skip"}) {
    expect_user_error(start_from_it({"--training.nonfinite", policy}),
                      {"step 1: loss nan",
                       "model.layers.1.mlp.shared_experts.up_proj.weight holds values that are not "
                       "finite, and nothing was updated"});
  }
  EXPECT_FALSE(fs::exists(path("run/checkpoint")));
}

// It moves only the choice of experts: loss and gradients stay finite.
TEST_F(BadWeights, NanInARoutersBiasStopsBeforeTheUpdate) {
  put_nan_into("model.layers.2.mlp.gate.e_score_correction_bias");
  expect_user_error(start_from_it(),
                    {"model.layers.2.mlp.gate.e_score_correction_bias holds values "
                     "that are not finite, and nothing was updated"});
}

TEST_F(BadWeights, EachSkippedStepIsLogged) {
  const auto result =
      start_from_it({"--training.nonfinite", "skip", "--optimizer.lr", "1e18", "--metrics.log_freq",
                     "100", "--training.max_norm", "inf", "--lr_scheduler.warmup_steps", "0"});
  expect_trained(result);
  for (const char* step : {"step 2/4", "step 3/4", "step 4/4"}) {
    EXPECT_THAT(result.err, ::testing::ContainsRegex(std::string(step) + ".*not finite: skipped"));
  }
}

}  // namespace
}  // namespace longhaul
