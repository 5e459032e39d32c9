// Weights from Hugging Face folders into models and runs, and out of runs into such folders.
#include "longhaul/base/fault.h"
#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/models/deepseek_v3/hf_adapter.h"
#include "longhaul/train/hf_export.h"
#include "longhaul/train/hf_import.h"
#include "longhaul/train/trained_model.h"
#include "tests/support/hf_tensors.h"
#include "tests/support/log_capture.h"
#include "tests/train/hf_fixture.h"

namespace longhaul::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

namespace v3 = deepseek_v3;

const at::Tensor& batches() {
  static const at::Tensor loaded = load_golden("hf_base/train20.safetensors").at("batches");
  return loaded;
}

v3::Model golden_shape(const std::string& name = "hf_base") {
  return {v3::parse_model_config(golden_json(name), name), v3::ModelSettings{}};
}

std::string load_error(v3::Model& model, const fs::path& folder, bool quantized = true) {
  try {
    train::load_hf_folder(model, folder.string(), {.quantized = quantized});
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(HfImport, PublishedFp8IsWhatItsScalesSay) {
  const TemporaryFolder folder;
  const Tensors fp8 = published(golden_weights("hf_base"));
  ASSERT_TRUE(fp8.contains("model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"));
  ASSERT_EQ(fp8.at("model.layers.1.self_attn.indexer.wq_b.weight_scale_inv").sizes(),
            (std::vector<int64_t>{2, 1}));
  write_hf(folder.path(), fp8, golden_json("hf_base", kPublishedQuantization));
  auto model = golden_shape();
  EXPECT_EQ(load_error(model, folder.path()), "");
  expect_identical_tensors(hf_tensors(model), meaning_of(fp8));
}

TEST(HfImport, WithoutAQueryLatent) {
  for (const bool fp8 : {false, true}) {
    const TemporaryFolder folder;
    Tensors weights = golden_weights_without_q_lora("hf_base");
    if (fp8) weights = published(weights);
    ASSERT_EQ(weights.at("model.layers.0.self_attn.q_proj.weight").sizes(),
              (std::vector<int64_t>{96, 128}));
    write_hf(folder.path(), weights, golden_json("hf_base", kNoQLora));
    v3::Model model(v3::parse_model_config(golden_json("hf_base", kNoQLora), "golden"),
                    v3::ModelSettings{});
    EXPECT_EQ(load_error(model, folder.path()), "");
    expect_identical_tensors(hf_tensors(model), fp8 ? meaning_of(weights) : weights);
    // With the latent of another model it is not the same.
    auto other = golden_shape();
    EXPECT_THAT(load_error(other, folder.path()),
                AllOf(HasSubstr("missing: model.layers.0.self_attn.q_a_layernorm.weight"),
                      HasSubstr("unexpected: model.layers.0.self_attn.q_proj.weight")));
  }
}

TEST(HfImport, QuantizedWeightsAreTakenOnlyIfTheJobSaysSo) {
  const TemporaryFolder folder;
  write_hf(folder.path(), published(golden_weights("hf_base")), golden_json("hf_base"));
  auto model = golden_shape();
  const Tensors before = hf_tensors(model);
  EXPECT_THAT(load_error(model, folder.path(), /*quantized=*/false),
              AllOf(HasSubstr("is quantized (F8_E4M3)"),
                    HasSubstr("checkpoint.initial_load_in_hf_quantized")));
  expect_identical_tensors(hf_tensors(model), before);
  // With it, others load as well.
  EXPECT_EQ(load_error(model, golden_path("hf_base") / "checkpoint"), "");
  expect_identical_tensors(hf_tensors(model), golden_weights("hf_base"));
}

// Everything that is wrong is listed in one message, before anything is written.
TEST(HfImport, EveryProblemOfAFolderIsNamed) {
  const TemporaryFolder folder;
  const std::string o_proj = "model.layers.1.self_attn.o_proj.weight";
  const std::string down = "model.layers.2.mlp.experts.5.down_proj.weight";
  Tensors fp8 = published(golden_weights("hf_base"));
  fp8.erase(o_proj + "_scale_inv");
  fp8[down + "_scale_inv"] = at::ones({2, 1});
  fp8.erase("model.norm.weight");
  fp8["model.layers.0.mlp.gate.weight"] = at::ones({8, 128});
  fp8["model.layers.0.mlp.nothing_scale_inv"] = at::ones({1, 1});
  fp8["lm_head.weight"] = at::ones({319, 128});
  write_hf(folder.path(), fp8, golden_json("hf_base"));
  auto model = golden_shape();
  const Tensors before = hf_tensors(model);
  EXPECT_THAT(load_error(model, folder.path()),
              AllOf(HasSubstr("missing: model.norm.weight"),
                    HasSubstr("unexpected: model.layers.0.mlp.gate.weight, "
                              "model.layers.0.mlp.nothing_scale_inv"),
                    HasSubstr("lm_head.weight is [319, 128], the model wants [320, 128]"),
                    HasSubstr(o_proj + "_scale_inv is missing"),
                    HasSubstr(down + "_scale_inv is [2, 1], [128, 16] has [1, 1] blocks"),
                    Not(HasSubstr("\n"))));
  expect_identical_tensors(hf_tensors(model), before);
}

TEST(HfImport, DamagedFilesAreNamed) {
  const TemporaryFolder folder;
  const fs::path file = folder.path() / "model.safetensors";
  write_hf(folder.path(), published(golden_weights("hf_base")), golden_json("hf_base"));
  auto model = golden_shape();
  const Tensors before = hf_tensors(model);
  const std::string bytes = read_file(file);
  for (const size_t length : {size_t{0}, size_t{5}, size_t{100}, bytes.size() - 1}) {
    write_text(file, bytes.substr(0, length));
    EXPECT_THAT(load_error(model, folder.path()), HasSubstr(file.string())) << length;
  }
  expect_identical_tensors(hf_tensors(model), before);
}

TEST(HfImport, ARunStartsFromPublishedWeights) {
  const GoldenJob job("hf_base", batches());
  const fs::path folder = job.folder.path() / "fp8";
  const Tensors fp8 = published(golden_weights("hf_base"));
  write_hf(folder, fp8, golden_json("hf_base", kPublishedQuantization));
  run(job.config({"--training.steps", "1", "--optimizer.lr", "1e-30", "--moe.bias_update_speed",
                  "0", "--checkpoint.initial_load_path", folder.string(),
                  "--checkpoint.initial_load_in_hf_quantized", "--checkpoint.last_save_in_hf"}));
  const Tensors saved = read_hf(job.folder.path() / "run/checkpoint/step-1-hf");
  const Tensors expected = meaning_of(fp8);
  EXPECT_EQ(names_of(saved), names_of(expected));
  for (const auto& [name, tensor] : expected) {
    EXPECT_LT((saved.at(name) - tensor).abs().max().item<double>(), 1e-25) << name;
  }
}

// What looks at weights reads what it is given; only a run asks before it starts from FP8.
TEST(HfImport, EvaluationTakesPublishedWeights) {
  const GoldenJob job("hf_base", batches());
  const fs::path folder = job.folder.path() / "fp8";
  const Tensors fp8 = published(golden_weights("hf_base"));
  write_hf(folder, fp8, golden_json("hf_base", kPublishedQuantization));
  for (const char* enable : {"true", "false"}) {
    const auto trained = train::load_trained_model(
        job.config({"--checkpoint.enable", enable, "--checkpoint.initial_load_in_hf", "false"}),
        folder.string());
    expect_identical_tensors(hf_tensors(*trained.model), meaning_of(fp8));
  }
}

// Beside the last checkpoint, which is the run's own.
TEST(HfExport, TheLastWeightsOfARun) {
  const GoldenJob job("hf_base", batches());
  const auto config = job.config({"--training.steps", "2", "--checkpoint.interval", "1",
                                  "--checkpoint.keep_latest_k", "2", "--checkpoint.last_save_in_hf",
                                  "--checkpoint.export_dtype", "bfloat16"});
  const fs::path folder = job.folder.path() / "run/checkpoint";
  write_text(folder / "step-2-hf/left_by_an_earlier_try", "x");
  EXPECT_EQ(run(config), train::Outcome::kFinished);
  const auto ours = checkpoint::load(folder / "step-2");
  EXPECT_TRUE(ours.model_only);
  Tensors expected;
  for (const auto& [name, tensor] : ours.tensors) {
    const bool bias = name.ends_with("e_score_correction_bias");
    EXPECT_EQ(tensor.scalar_type(), bias ? at::kFloat : at::kBFloat16) << name;
    for (const auto& [hf_name, view] : v3::hf_views(name, tensor)) expected[hf_name] = view;
  }
  expect_identical_tensors(read_hf(folder / "step-2-hf"), expected);
  EXPECT_FALSE(fs::exists(folder / "step-2-hf/left_by_an_earlier_try"));

  const auto json = nlohmann::json::parse(read_file(folder / "step-2-hf/config.json"));
  EXPECT_EQ(json["torch_dtype"], "bfloat16");
  EXPECT_EQ(json["eos_token_id"], 1);
  EXPECT_EQ(json["architectures"][0], "DeepseekV32ForCausalLM");
  const fs::path assets = golden_path("hf_base") / "checkpoint";
  EXPECT_EQ(read_file(folder / "step-2-hf/generation_config.json"),
            read_file(assets / "generation_config.json"));
  EXPECT_FALSE(fs::exists(folder / "step-2-hf/tokenizer.json")) << "there is none to carry along";
  // It is neither resumed from nor purged.
  EXPECT_EQ(run(config), train::Outcome::kAlreadyDone);
  EXPECT_EQ(run(job.config({"--training.steps", "5", "--checkpoint.interval", "1",
                            "--checkpoint.keep_latest_k", "2"})),
            train::Outcome::kFinished);
  EXPECT_EQ(job.metrics().size(), 5u);
  EXPECT_TRUE(fs::exists(folder / "step-2-hf/config.json"));
}

// The step-N beside it stays as it is: nothing of ours is FP8.
TEST(HfExport, Fp8IsOfTheFolderAlone) {
  const GoldenJob job("hf_base", batches());
  run(job.config({"--training.steps", "1", "--checkpoint.last_save_in_hf",
                  "--checkpoint.export_dtype", "float8_e4m3fn"}));
  const fs::path folder = job.folder.path() / "run/checkpoint";
  const auto ours = checkpoint::load(folder / "step-1");
  Tensors weights;
  for (const auto& [name, tensor] : ours.tensors) {
    EXPECT_EQ(tensor.scalar_type(), at::kFloat) << name;
    for (const auto& [hf_name, view] : v3::hf_views(name, tensor)) weights[hf_name] = view;
  }
  const Tensors saved = read_hf(folder / "step-1-hf");
  const Tensors expected = published(weights);
  EXPECT_EQ(names_of(saved), names_of(expected));
  for (const auto& [name, tensor] : expected) {
    if (tensor.scalar_type() != at::kFloat8_e4m3fn) continue;
    EXPECT_TRUE(at::equal(saved.at(name).view(at::kByte), tensor.view(at::kByte))) << name;
  }
  // A run reads it.
  auto model = golden_shape();
  EXPECT_EQ(load_error(model, folder / "step-1-hf"), "");
  EXPECT_EQ(load_error(model, folder / "step-1-hf", /*quantized=*/false).empty(), false);
}

// It would be found out after the last step.
TEST(HfExport, ABrokenConfigOfTheAssetsIsFoundAtTheStart) {
  const GoldenJob job("hf_base", batches());
  const fs::path assets = job.folder.path() / "assets";
  const std::vector<std::string> words = {"--training.steps",
                                          "1",
                                          "--model.flavor",
                                          "tiny",
                                          "--model.hf_assets_path",
                                          assets.string(),
                                          "--checkpoint.initial_load_path",
                                          "None",
                                          "--checkpoint.initial_load_in_hf",
                                          "false",
                                          "--checkpoint.last_save_in_hf"};
  for (const char* broken : {"{\"eos_token_id\": 1,", "[]"}) {
    write_text(assets / "config.json", broken);
    try {
      run(job.config(words));
      FAIL() << "no error";
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("model.hf_assets_path"),
                                      HasSubstr((assets / "config.json").string())));
    }
    EXPECT_FALSE(fs::exists(job.folder.path() / "run/checkpoint"));
  }
}

// Whatever step it was for.
TEST(HfExport, WhatADeadExportHasLeftGoesWithTheNextOne) {
  const GoldenJob job("hf_base", batches());
  const fs::path folder = job.folder.path() / "run/checkpoint";
  for (const char* name : {".step-7-hf.tmp-1", ".mine-hf.tmp-1"}) {
    fs::create_directories(folder / name);
  }
  run(job.config({"--training.steps", "1", "--checkpoint.last_save_in_hf"}));
  EXPECT_TRUE(fs::exists(folder / "step-1-hf/config.json"));
  EXPECT_FALSE(fs::exists(folder / ".step-7-hf.tmp-1"));
  EXPECT_TRUE(fs::exists(folder / ".mine-hf.tmp-1"));
}

// The whole state was saved in its place, and is no reason to leave it out.
TEST(HfExport, AfterOneThatFailedTheSameCommandMakesTheFolder) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const GoldenJob job("hf_base", batches());
  const auto config = job.config({"--training.steps", "2", "--checkpoint.last_save_in_hf"});
  const fs::path folder = job.folder.path() / "run/checkpoint";
  for (int i = 0; i < 2; ++i) {
    const fault::Armed full_disk("hf_folder.rename:1:enospc");
    EXPECT_THROW(run(config), UserError);
    EXPECT_FALSE(fs::exists(folder / "step-2-hf"));
    EXPECT_FALSE(checkpoint::load(folder / "step-2").model_only);
  }
  EXPECT_EQ(run(config), train::Outcome::kFinished);
  const Tensors saved = read_hf(folder / "step-2-hf");
  const auto ours = checkpoint::load(folder / "step-2");
  EXPECT_TRUE(at::equal(saved.at("model.norm.weight"), ours.tensors.at("model.norm.weight")));
  EXPECT_EQ(job.metrics().size(), 2u);
  EXPECT_EQ(run(config), train::Outcome::kAlreadyDone);
}

TEST(HfExport, OtherwiseTheLastWeightsKeepTheirType) {
  const GoldenJob job("hf_base", batches());
  run(job.config({"--training.steps", "1", "--training.dtype", "bfloat16"}));
  const auto saved = checkpoint::load(job.folder.path() / "run/checkpoint/step-1");
  EXPECT_EQ(saved.tensors.at("lm_head.weight").scalar_type(), at::kBFloat16);
  EXPECT_FALSE(fs::exists(job.folder.path() / "run/checkpoint/step-1-hf"));
}

TEST(HfExport, Float16HasALargestValue) {
  EXPECT_EQ(train::to_dtype("w", at::full({2}, 65504.0), at::kHalf).scalar_type(), at::kHalf);
  try {
    train::to_dtype("w", at::full({2}, 1e5), at::kHalf);
    FAIL() << "no error";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("w holds values"), HasSubstr("bfloat16")));
  }
}

}  // namespace
}  // namespace longhaul::testing
