// There and back: the same bits.
#include "longhaul/train/convert.h"

#include <atomic>
#include <cmath>
#include <functional>
#include <map>

#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/dtensor/placement.h"
#include "longhaul/models/deepseek_v3/hf_adapter.h"
#include "longhaul/ops/cpu_allocator.h"
#include "longhaul/train/hf_export.h"
#include "longhaul/train/hf_import.h"
#include "tests/support/log_capture.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temp_folder.h"
#include "tests/train/hf_fixture.h"

namespace longhaul::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

namespace v3 = deepseek_v3;

class Convert : public ::testing::Test {
 protected:
  void convert(const fs::path& from, const std::string& to,
               const train::ConvertOptions& options = {}) const {
    train::convert(from, path(to), options);
  }
  std::string error(const fs::path& from, const std::string& to,
                    const train::ConvertOptions& options = {}) const {
    return test::error_of<UserError>([&] { convert(from, to, options); });
  }
  static fs::path golden(const std::string& name) { return golden_path(name) / "checkpoint"; }
  fs::path path(const std::string& name) const { return folder_.path() / name; }

  TemporaryFolder folder_;
};

TEST_F(Convert, ThereAndBackIsTheSameBits) {
  for (const std::string name : {"hf_base", "hf_yarn"}) {
    convert(golden(name), name + "/step-0");
    // Small shards, so that layers' experts are divided among files.
    convert(path(name) / "step-0", name + "/back", {.max_shard_bytes = 100'000});
    const auto files = fs::directory_iterator(path(name) / "back");
    EXPECT_GT(std::distance(fs::begin(files), fs::end(files)), 10);
    expect_identical_tensors(read_hf(path(name) / "back"), golden_weights(name));
    EXPECT_EQ(v3::parse_model_config(read_file(path(name) / "back/config.json"), "back"),
              v3::parse_model_config(golden_json(name), "golden"));
    EXPECT_EQ(read_file(path(name) / "back/generation_config.json"),
              read_file(golden(name) / "generation_config.json"));
    const auto ours = checkpoint::load(path(name) / "step-0");
    EXPECT_TRUE(ours.model_only);
    EXPECT_EQ(ours.tensors.at("model.layers.1.mlp.experts.up_proj.weight").sizes(),
              (std::vector<int64_t>{8, 16, 128}));
  }
}

// Types, names, scales and FP8 bits; scales may differ in the last bit.
void expect_published(const Tensors& actual, const Tensors& weights) {
  const Tensors expected = published(weights);
  EXPECT_EQ(names_of(actual), names_of(expected));
  for (const auto& [name, tensor] : expected) {
    const at::Tensor found = actual.at(name);
    ASSERT_EQ(found.sizes(), tensor.sizes()) << name;
    if (tensor.scalar_type() == at::kFloat8_e4m3fn) {
      EXPECT_TRUE(at::equal(found.view(at::kByte), tensor.view(at::kByte))) << name;
    } else if (name.ends_with("_scale_inv")) {
      EXPECT_EQ(found.scalar_type(), at::kFloat) << name;
      EXPECT_TRUE(at::allclose(found, tensor, /*rtol=*/2e-7, /*atol=*/0)) << name;
    } else {
      const bool fp32 = name.ends_with("e_score_correction_bias") ||
                        name.find("indexer.k_norm") != std::string::npos;
      expect_identical_tensors({{name, found}}, {{name, fp32 ? tensor : tensor.to(at::kBFloat16)}});
    }
  }
}

TEST_F(Convert, ThereAndBackWithoutAQueryLatent) {
  const Tensors weights = golden_weights_without_q_lora("hf_base");
  write_hf(path("theirs"), weights, golden_json("hf_base", kNoQLora));
  convert(path("theirs"), "step-0");
  // The assets of a model that has one do not bring it back.
  convert(path("step-0"), "back", {.assets = golden("hf_base")});
  expect_identical_tensors(read_hf(path("back")), weights);
  const auto json = nlohmann::json::parse(read_file(path("back/config.json")));
  EXPECT_TRUE(json.at("q_lora_rank").is_null());
  EXPECT_EQ(v3::parse_model_config(json.dump(), "back"),
            v3::parse_model_config(golden_json("hf_base", kNoQLora), "golden"));
  convert(path("step-0"), "fp8", {.dtype = at::kFloat8_e4m3fn});
  expect_published(read_hf(path("fp8")), weights);
}

// The reference has no copies in its MTP layer; the published form has, and they are ours again.
TEST_F(Convert, MtpLayersGetTheCopiesOfThePublishedForm) {
  Tensors expected = golden_weights("tt_mtp_yarn");
  convert(golden("tt_mtp_yarn"), "step-0");
  convert(path("step-0"), "back");
  expected["model.layers.2.embed_tokens.weight"] = expected.at("model.embed_tokens.weight");
  expected["model.layers.2.shared_head.head.weight"] = expected.at("lm_head.weight");
  expected["model.layers.2.shared_head.norm.weight"] = expected.at("model.norm.weight");
  expect_identical_tensors(read_hf(path("back")), expected);
  const test::LogCapture log;
  convert(path("back"), "step-1");
  EXPECT_THAT(log.text(), Not(HasSubstr("differ")));
  const auto once = checkpoint::load(path("step-0")), twice = checkpoint::load(path("step-1"));
  expect_identical_tensors(twice.tensors, once.tensors);
}

// A norm of its own is a parameter; copies of what is always shared are dropped, but not in
// silence.
TEST_F(Convert, MtpTensorsThatDifferFromTheTrunks) {
  Tensors tensors = golden_weights("tt_mtp_yarn");
  const std::string norm = "model.layers.2.shared_head.norm.weight";
  const std::string head = "model.layers.2.shared_head.head.weight";
  tensors[norm] = tensors.at("model.norm.weight") + 1;
  tensors[head] = tensors.at("lm_head.weight") + 1;
  tensors["model.layers.2.embed_tokens.weight"] = tensors.at("model.embed_tokens.weight");
  write_hf(path("theirs"), tensors, golden_json("tt_mtp_yarn"));
  const test::LogCapture log;
  convert(path("theirs"), "step-0");
  EXPECT_THAT(log.text(), AllOf(HasSubstr(head + " (here lm_head.weight)"),
                                Not(HasSubstr("embed_tokens")), HasSubstr("mtp.own_norm = true")));
  EXPECT_TRUE(at::equal(checkpoint::load(path("step-0")).tensors.at(norm), tensors.at(norm)));
  convert(path("step-0"), "back");
  tensors[head] = tensors.at("lm_head.weight");
  expect_identical_tensors(read_hf(path("back")), tensors);

  // A model without such a norm says that it does not take it.
  v3::Model model(v3::parse_model_config(golden_json("tt_mtp_yarn"), "golden"), {});
  const test::LogCapture own_log;
  train::load_hf_folder(model, path("theirs").string(), {});
  EXPECT_THAT(own_log.text(), HasSubstr(norm + " (here model.norm.weight)"));
}

TEST_F(Convert, Fp8BecomesBfloat16OrWhatIsAskedFor) {
  const Tensors fp8 = published(golden_weights("hf_base"));
  write_hf(path("fp8"), fp8, golden_json("hf_base", kPublishedQuantization));
  Tensors rounded = meaning_of(fp8), exact = rounded;
  for (auto& [name, tensor] : rounded) {
    if (fp8.at(name).scalar_type() == at::kFloat8_e4m3fn) tensor = tensor.to(at::kBFloat16);
  }
  convert(path("fp8"), "a/step-0");
  convert(path("a/step-0"), "a/back");
  expect_identical_tensors(read_hf(path("a/back")), rounded);
  convert(path("fp8"), "b/step-0", {.dtype = at::kFloat});
  convert(path("b/step-0"), "b/back");
  expect_identical_tensors(read_hf(path("b/back")), exact);
  const auto json = nlohmann::json::parse(read_file(path("b/back/config.json")));
  EXPECT_FALSE(json.contains("quantization_config"));
  EXPECT_EQ(json["torch_dtype"], "float32");
}

// The folders' files by name.
std::map<std::string, std::string> files_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) {
    files[entry.path().filename().string()] = read_file(entry.path());
  }
  return files;
}

// Blocks of other sizes than the parameters', experts that lie in several files, and the indexer.
TEST_F(Convert, IntoFp8AsPublished) {
  for (const std::string name : {"hf_base", "tt_mtp_yarn"}) {
    convert(golden(name), name + "/step-0");
    convert(path(name) / "step-0", name + "/fp8",
            {.dtype = at::kFloat8_e4m3fn, .max_shard_bytes = 20'000});
    const Tensors fp8 = read_hf(path(name) / "fp8");
    Tensors weights = golden_weights(name);
    if (name == "tt_mtp_yarn") {
      const std::string layer = "model.layers.2.";
      weights[layer + "embed_tokens.weight"] = weights.at("model.embed_tokens.weight");
      weights[layer + "shared_head.head.weight"] = weights.at("lm_head.weight");
      weights[layer + "shared_head.norm.weight"] = weights.at("model.norm.weight");
    }
    expect_published(fp8, weights);
    const auto files = files_of(path(name) / "fp8");
    EXPECT_GT(files.size(), 10u);
    const auto json = nlohmann::json::parse(files.at("config.json"));
    EXPECT_EQ(json["torch_dtype"], "bfloat16");
    EXPECT_EQ(json["quantization_config"],
              nlohmann::json::parse(R"({"activation_scheme": "dynamic", "fmt": "e4m3",
                                        "quant_method": "fp8", "weight_block_size": [128, 128]})"));
    const auto index = nlohmann::json::parse(files.at("model.safetensors.index.json"));
    EXPECT_EQ(index["weight_map"].size(), fp8.size());

    // What is read of it is written again bit by bit.
    convert(path(name) / "fp8", name + "/again/step-0", {.dtype = at::kFloat});
    convert(path(name) / "again/step-0", name + "/again_fp8",
            {.dtype = at::kFloat8_e4m3fn, .max_shard_bytes = 20'000});
    EXPECT_EQ(files_of(path(name) / "again_fp8"), files);
  }
}

TEST_F(Convert, Bfloat16WeightsGoThroughFp8TheSame) {
  convert(golden("hf_base"), "step-0", {.dtype = at::kBFloat16});
  convert(path("step-0"), "fp8", {.dtype = at::kFloat8_e4m3fn});
  convert(path("fp8"), "back/step-0");
  EXPECT_EQ(checkpoint::load(path("back/step-0")).tensors.at("lm_head.weight").scalar_type(),
            at::kBFloat16);
  convert(path("back/step-0"), "again", {.dtype = at::kFloat8_e4m3fn});
  EXPECT_EQ(files_of(path("again")), files_of(path("fp8")));
}

TEST_F(Convert, Fp8IsNoTypeOfAStepFolder) {
  EXPECT_THAT(error(golden("hf_base"), "step-0", {.dtype = at::kFloat8_e4m3fn}),
              AllOf(HasSubstr(path("step-0").string()), HasSubstr("never FP8"),
                    HasSubstr("leave --dtype out")));
  EXPECT_FALSE(fs::exists(path("step-0")));
}

TEST_F(Convert, WeightsWithoutScalesAreNamed) {
  for (const std::string name :
       {"model.layers.1.mlp.experts.3.up_proj.weight", "model.norm.weight"}) {
    for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      Tensors weights = golden_weights("hf_base");
      weights[name].view(-1)[5] = value;
      write_hf(path("wrong"), weights, golden_json("hf_base"));
      convert(path("wrong"), "step-0");
      EXPECT_THAT(error(path("step-0"), "fp8", {.dtype = at::kFloat8_e4m3fn}),
                  HasSubstr(name + " holds values that are not finite"));
      EXPECT_FALSE(fs::exists(path("fp8")));
      fs::remove_all(path("step-0"));
    }
  }
}

// Each rank writes a share of the files.
TEST_F(Convert, Fp8OfThreeRanksIsThatOfOneByteForByte) {
  convert(golden("hf_base"), "step-0");
  const auto saved = checkpoint::load(path("step-0"));
  const auto config = v3::parse_model_config(golden_json("hf_base"), "golden");
  train::HfExportOptions options = {.fp8 = true, .max_shard_bytes = 20'000};
  train::export_hf(path("one"), saved, config, options);
  test::run_ranks(3, [&](dtensor::World& world) {
    const auto ranks = world.make_group("export", {0, 1, 2});
    train::HfExportOptions own = options;
    own.ranks = &ranks;
    train::export_hf(path("three"), saved, config, own);
  });
  const auto files = files_of(path("one"));
  EXPECT_GT(files.size(), 10u);
  EXPECT_EQ(files_of(path("three")), files);
}

// Rows of each parameter, and their bytes.
int64_t keep_rows(checkpoint::Snapshot& snapshot, const dtensor::Communicator& ranks) {
  int64_t bytes = 0;
  for (auto& [name, tensor] : snapshot.tensors) {
    const auto own = dtensor::slice_of(tensor.size(0), ranks.size(), ranks.rank());
    std::vector<int64_t> offsets(static_cast<size_t>(tensor.dim()), 0);
    offsets[0] = own.start;
    const at::Tensor rows = tensor.narrow(0, own.start, own.length).clone();
    bytes += static_cast<int64_t>(rows.nbytes());
    snapshot.parts[name] = {rows, offsets};
    tensor = at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
  }
  return bytes;
}

// Small files divide experts that are one parameter among ranks; of one file each part moves once.
TEST_F(Convert, PartsGoToTheRankThatWritesThem) {
  convert(golden("hf_base"), "step-0");
  const auto saved = checkpoint::load(path("step-0"));
  const auto config = v3::parse_model_config(golden_json("hf_base"), "golden");
  for (const bool fp8 : {false, true}) {
    for (const int64_t max_bytes : {int64_t{1} << 30, int64_t{20'000}}) {
      SCOPED_TRACE(fmt::format("fp8 {}, files of {}", fp8, max_bytes));
      const train::HfExportOptions options = {
          .fp8 = fp8, .max_shard_bytes = max_bytes, .replace = true};
      train::export_hf(path("one"), saved, config, options);
      std::atomic<int64_t> sent = 0, held = 0;
      test::run_ranks(3, [&](dtensor::World& world) {
        const auto ranks = world.make_group("export", {0, 1, 2});
        checkpoint::Snapshot own = saved;
        const int64_t bytes = keep_rows(own, ranks);
        train::HfExportOptions together = options;
        together.ranks = &ranks;
        train::export_hf(path("three"), own, config, together);
        if (ranks.rank() > 0) held += bytes;
        sent += world.log().total(dtensor::CollectiveKind::kAllToAll, "export").bytes;
      });
      EXPECT_EQ(files_of(path("three")), files_of(path("one")));
      const bool once = !fp8 && max_bytes > 1'000'000;  // one file, in the parameters' order
      EXPECT_TRUE(!once || sent == held) << sent << " bytes of " << held;
    }
  }
}

TEST_F(Convert, DtypesOfBothDirections) {
  convert(golden("hf_base"), "step-0", {.dtype = at::kBFloat16});
  convert(golden("hf_base"), "whole/step-0");
  convert(path("whole"), "half", {.dtype = at::kBFloat16});  // the newest in it
  Tensors expected = golden_weights("hf_base");
  for (auto& [name, tensor] : expected) {
    if (!name.ends_with("e_score_correction_bias")) tensor = tensor.to(at::kBFloat16);
  }
  expect_identical_tensors(read_hf(path("half")), expected);
  convert(path("step-0"), "there_first");
  expect_identical_tensors(read_hf(path("there_first")), expected);
}

TEST_F(Convert, TheTokenizerGoesAlong) {
  fs::create_directories(path("theirs"));
  fs::copy(golden("hf_base"), path("theirs"));
  write_text(path("theirs/tokenizer.json"), "{\"a\": 1}");
  write_text(path("theirs/tokenizer_config.json"), "{}");
  write_text(path("theirs/README.md"), "of another model");
  convert(path("theirs"), "step-0");
  convert(path("step-0"), "back");
  EXPECT_EQ(read_file(path("back/tokenizer.json")), "{\"a\": 1}");
  EXPECT_EQ(read_file(path("back/tokenizer_config.json")), "{}");
  EXPECT_FALSE(fs::exists(path("back/README.md")));
  const test::LogCapture log;
  convert(path("step-0"), "other", {.assets = path("nowhere")});
  EXPECT_FALSE(fs::exists(path("other/tokenizer.json")));
  EXPECT_THAT(log.text(),
              AllOf(HasSubstr("warning"), HasSubstr("has no tokenizer"),
                    HasSubstr("'" + path("nowhere").string() + "'"), HasSubstr("--assets")));
}

// The small files are in the step folder; the others are named.
TEST_F(Convert, ConfigsGoAlongWhereTheFolderIsGone) {
  write_hf(path("theirs"), golden_weights("hf_base"),
           golden_json("hf_base", {{"some_key", {{"of", "theirs"}}}}));
  write_text(path("theirs/generation_config.json"), "{\"top_p\": 0.95}");
  write_text(path("theirs/tokenizer.json"), "{}");
  convert(path("theirs"), "step-0");
  fs::remove_all(path("theirs"));
  const test::LogCapture log;
  convert(path("step-0"), "back");
  EXPECT_EQ(read_file(path("back/generation_config.json")), "{\"top_p\": 0.95}");
  const auto json = nlohmann::json::parse(read_file(path("back/config.json")));
  EXPECT_EQ(json.value("some_key", nlohmann::json()).dump(), "{\"of\":\"theirs\"}");
  EXPECT_THAT(log.text(), HasSubstr("there are no tokenizer.json, tokenizer_config.json in '" +
                                    path("theirs").string() + "'"));
  // What is there counts.
  write_text(path("assets/generation_config.json"), "{}");
  convert(path("step-0"), "other", {.assets = path("assets")});
  EXPECT_EQ(read_file(path("other/generation_config.json")), "{}");
}

// What says nothing of the model is carried along; nothing of another one is.
TEST_F(Convert, TheirConfigGoesAlongWhereItIsNotOfTheModel) {
  const nlohmann::json carried = {{"eos_token_id", {1, 2}},
                                  {"pad_token_id", nullptr},
                                  {"ep_size", 1},
                                  {"use_cache", true},
                                  {"some_key", {{"of", "theirs"}}}};
  const nlohmann::json of_another = {
      {"rope_theta", 5e6},
      {"rope_scaling",
       {{"type", "yarn"}, {"factor", 40}, {"original_max_position_embeddings", 4096}}},
      {"rope_interleave", false},
      {"q_lora_rank", 1536},
      {"index_n_heads", 64},
      {"index_head_dim", 128},
      {"index_topk", 2048},
      {"indexer_types", {"full"}},
      {"layer_types", {"indexed_attention"}},
      {"mlp_layer_types", {"sparse"}},
      {"mlp_bias", true},
      {"attention_bias", true},
      {"topk_method", "greedy"},
      {"qk_head_dim", 192},
      {"num_hidden_layers", 61},
      {"dtype", "float16"},
      {"torch_dtype", "float16"},
      {"auto_map", {{"AutoConfig", "configuration_deepseek.DeepseekV3Config"}}},
      {"quantization_config", kPublishedQuantization["quantization_config"]}};
  nlohmann::json theirs = carried;
  theirs.update(of_another);
  write_text(path("assets/config.json"), theirs.dump());

  // Dense attention, and a router without biases.
  nlohmann::json shape = {{"model_type", "deepseek_v3"}, {"scoring_func", "softmax"}};
  for (const char* key : {"index_n_heads", "index_head_dim", "index_topk", "layer_types"}) {
    shape[key] = nullptr;
  }
  const auto config = v3::parse_model_config(golden_json("hf_base", shape), "golden");
  Tensors weights = golden_weights("hf_base");
  std::erase_if(weights, [](const auto& named) {
    return named.first.find(".indexer.") != std::string::npos ||
           named.first.ends_with("e_score_correction_bias");
  });
  write_hf(path("theirs"), weights, golden_json("hf_base", shape));
  convert(path("theirs"), "step-0");
  for (const bool fp8 : {false, true}) {
    const std::string name = fp8 ? "fp8" : "back";
    train::ConvertOptions options{.assets = path("assets")};
    if (fp8) options.dtype = at::kFloat8_e4m3fn;
    convert(path("step-0"), name, options);
    const auto json = nlohmann::json::parse(read_file(path(name) / "config.json"));
    EXPECT_EQ(v3::parse_model_config(json.dump(), name), config);
    for (const auto& [key, value] : carried.items()) EXPECT_EQ(json.at(key), value) << key;
    EXPECT_EQ(json.at("torch_dtype"), fp8 ? "bfloat16" : "float32");
    EXPECT_EQ(json.contains("quantization_config"), fp8);
    EXPECT_EQ(json.at("num_hidden_layers"), 4);
    EXPECT_EQ(json.at("attention_bias"), false);
    for (const char* key : {"rope_theta", "rope_scaling", "rope_interleave", "index_n_heads",
                            "indexer_types", "layer_types", "mlp_layer_types", "mlp_bias",
                            "topk_method", "qk_head_dim", "dtype", "auto_map"}) {
      EXPECT_FALSE(json.contains(key)) << key;
    }
  }
}

TEST_F(Convert, ABrokenConfigOfTheAssetsIsFoundBeforeAnythingIsWritten) {
  convert(golden("hf_base"), "step-0");
  write_text(path("assets/config.json"), "{\"eos_token_id\": 1,");
  bool began = false;
  EXPECT_THAT(
      error(path("step-0"), "back",
            {.assets = path("assets"), .progress = [&](int64_t, int64_t) { began = true; }}),
      HasSubstr(path("assets/config.json").string() + ":1: not valid JSON"));
  EXPECT_FALSE(began);
  EXPECT_FALSE(fs::exists(path("back")));
}

// Of a run: with moments, and a job that names its assets.
TEST_F(Convert, AFullCheckpointOfARun) {
  const at::Tensor batches = load_golden("hf_base/train20.safetensors").at("batches");
  const GoldenJob job("hf_base", batches);
  run(job.config({"--training.steps", "1", "--checkpoint.last_save_model_only", "false"}));
  const fs::path saved = job.folder.path() / "run/checkpoint/step-1";
  convert(saved, "exported");
  EXPECT_TRUE(fs::exists(path("exported/generation_config.json")));
  Tensors expected;
  for (const auto& [name, tensor] : checkpoint::load(saved).tensors) {
    if (name.starts_with("optimizer.")) continue;
    for (const auto& [hf_name, view] : v3::hf_views(name, tensor)) expected[hf_name] = view;
  }
  expect_identical_tensors(read_hf(path("exported")), expected);
}

// Its path is relative to where the run was started, not to where its weights are converted.
TEST_F(Convert, ARunsTokenizerIsFoundFromElsewhere) {
  const GoldenJob job("hf_base", load_golden("hf_base/train20.safetensors").at("batches"));
  const std::string assets = fs::relative(golden("hf_base")).string();
  run(job.config({"--training.steps", "1", "--model.hf_assets_path", assets}));
  const fs::path saved = job.folder.path() / "run/checkpoint/step-1", here = fs::current_path();
  EXPECT_EQ(checkpoint::load(saved).trainer["hf_assets_path"], (here / assets).string());
  fs::current_path(folder_.path());
  EXPECT_NO_THROW(convert(saved, "exported"));
  fs::current_path(here);
  EXPECT_TRUE(fs::exists(path("exported/generation_config.json")));
}

// hf_base with its last layer once more for each further one, as a Hugging Face folder.
void write_layers(const fs::path& folder, int num_layers) {
  Tensors weights = golden_weights("hf_base");
  auto config = nlohmann::json::parse(golden_json("hf_base"));
  const std::string last = "model.layers.3.";
  for (const auto& [name, tensor] : golden_weights("hf_base")) {
    if (!name.starts_with(last)) continue;
    for (int i = 4; i < num_layers; ++i) {
      weights[fmt::format("model.layers.{}.{}", i, name.substr(last.size()))] = tensor;
    }
  }
  for (int i = 4; i < num_layers; ++i) {
    for (const char* key : {"layer_types", "mlp_layer_types"})
      config[key].push_back(config[key][3]);
  }
  config["num_hidden_layers"] = num_layers;
  write_hf(folder, weights, config.dump());
}

// The most that tensors hold at once while it runs.
int64_t most_bytes_of(const std::function<void()>& action) {
  ops::restart_most_cpu_tensor_bytes();
  const int64_t before = ops::most_cpu_tensor_bytes();
  action();
  return ops::most_cpu_tensor_bytes() - before;
}

// The weights grow by 3.5 MB; the largest tensor has 164 kB.
TEST_F(Convert, TheMemoryOfManyLayersIsThatOfFew) {
  ops::install_cpu_allocator();
  const std::optional<at::ScalarType> same, fp8 = at::kFloat8_e4m3fn;
  std::map<int, std::vector<int64_t>> most;  // by layers: there, back, and back as FP8
  for (const int layers : {4, 12}) {
    const std::string name = std::to_string(layers);
    write_layers(path(name) / "theirs", layers);
    const auto measure = [&](const char* from, const char* to,
                             std::optional<at::ScalarType> dtype) {
      most[layers].push_back(
          most_bytes_of([&] { convert(path(name) / from, name + "/" + to, {.dtype = dtype}); }));
    };
    measure("theirs", "step-0", same);
    measure("step-0", "back", same);
    measure("step-0", "fp8", fp8);
  }
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_GE(most[4][i], 163'840) << i;
    EXPECT_LT(most[12][i] - most[4][i], 163'840) << i;
  }
}

TEST_F(Convert, MistakesAreNamedAndNothingIsWritten) {
  const fs::path base = golden("hf_base");
  EXPECT_THAT(error(path("nowhere"), "step-0"), HasSubstr("'" + path("nowhere").string() + "'"));
  EXPECT_THAT(error(base, "weights"),
              AllOf(HasSubstr("name a step folder"), HasSubstr("weights/step-0")));
  EXPECT_THAT(error(base, "step-01"), HasSubstr("name a step folder"));
  EXPECT_THAT(error(base / "model.safetensors", "step-0", {.config = path("none.json")}),
              HasSubstr("none.json"));
  fs::create_directories(path("without_config"));
  fs::copy(base / "model.safetensors", path("without_config"));
  EXPECT_THAT(error(path("without_config"), "step-0"), HasSubstr("--config"));
  fs::create_directories(path("caf\xe9"));
  EXPECT_THAT(error(base, "step-0", {.assets = path("caf\xe9")}),
              AllOf(HasSubstr("is not UTF-8"), HasSubstr("--assets")));
  EXPECT_THAT(error(base, "step-0", {.config = golden("hf_yarn") / "config.json"}),
              AllOf(HasSubstr("unexpected: model.layers.2."), HasSubstr("--config")));
  EXPECT_FALSE(fs::exists(path("step-0")));

  convert(path("without_config"), "step-0", {.config = base / "config.json"});
  const std::string manifest = read_file(path("step-0/manifest.json"));
  EXPECT_THAT(error(base, "step-0"), HasSubstr("is there already"));
  EXPECT_EQ(read_file(path("step-0/manifest.json")), manifest);
  fs::create_directories(path("out"));
  EXPECT_THAT(error(path("step-0"), "out"), HasSubstr("is there already"));
  EXPECT_THAT(error(path("step-0"), "new", {.config = golden("hf_yarn") / "config.json"}),
              AllOf(HasSubstr("does not fit"), HasSubstr("--config")));

  for (const auto& entry : fs::directory_iterator(path("step-0"))) {
    if (entry.path().extension() == ".safetensors") {
      test::flip_byte(entry.path(), fs::file_size(entry.path()) - 3);
    }
  }
  EXPECT_THAT(error(path("step-0"), "new"), HasSubstr("does not match its checksum"));
  EXPECT_FALSE(fs::exists(path("new")));
}

// What the manifest of an older version, or of another program, may lack.
TEST_F(Convert, AManifestThatDoesNotSayWhichModel) {
  convert(golden("hf_base"), "step-0");
  auto snapshot = checkpoint::load(path("step-0"));
  snapshot.trainer = nlohmann::json::object();
  checkpoint::save(folder_.path(), snapshot);
  EXPECT_THAT(error(path("step-0"), "out"), HasSubstr("--config"));
  convert(path("step-0"), "out", {.config = golden("hf_base") / "config.json"});
  expect_identical_tensors(read_hf(path("out")), golden_weights("hf_base"));
}

}  // namespace
}  // namespace longhaul::testing
