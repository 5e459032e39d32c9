// Hugging Face folders on ranks: whatever part of the weights a rank holds, it has the values of
// the one rank, and what all export together is what one rank exports.
#include <gmock/gmock.h>

#include "longhaul/models/deepseek_v3/hf_adapter.h"
#include "tests/parallel/layout_harness.h"
#include "tests/support/hf_tensors.h"
#include "tests/train/hf_fixture.h"

namespace longhaul::testing {
namespace {

// Matrices of several blocks whose rows and columns no block divides; the ranks' edges lie within
// blocks.
v3::ModelConfig config_with_blocks() {
  auto c = layout_model();
  c.hidden_size = 150;
  c.intermediate_size = 200;
  c.moe_intermediate_size = 140;
  c.num_hidden_layers = 2;
  c.n_routed_experts = 6;
  c.q_lora_rank = 130;
  return c;
}

// Parameters that exist once, for whatever uses them.
Tensors random_weights(const v3::ModelConfig& config) {
  v3::Model model(config, {});
  randomize(model, 7);
  return hf_tensors(model);
}

class HfOnRanks : public ::testing::TestWithParam<Layout> {};

// A step of a rate that changes nothing lies between import and export.
TEST_P(HfOnRanks, PublishedWeightsInAndOut) {
  const auto shape = config_with_blocks();
  const Tensors fp8 = published(random_weights(shape));
  const TemporaryFolder folder;
  write_hf(folder.path(), fp8, v3::to_hf_json(shape));
  const LayoutJob job;
  job.train(
      GetParam(), "run",
      {"--model.hf_assets_path", folder.path().string(), "--training.steps", "1", "--optimizer.lr",
       "1e-30", "--moe.bias_update_speed", "0", "--checkpoint.enable",
       "--checkpoint.initial_load_path", folder.path().string(), "--checkpoint.initial_load_in_hf",
       "--checkpoint.initial_load_in_hf_quantized", "--checkpoint.last_save_in_hf"});
  Tensors expected = meaning_of(fp8);
  const std::string mtp = "model.layers.2.";
  expected[mtp + "embed_tokens.weight"] = expected.at("model.embed_tokens.weight");
  expected[mtp + "shared_head.head.weight"] = expected.at("lm_head.weight");
  expected[mtp + "shared_head.norm.weight"] = expected.at("model.norm.weight");
  const Tensors saved = read_hf(job.folder() / "run/checkpoint/step-1-hf");
  EXPECT_EQ(names_of(saved), names_of(expected));
  for (const auto& [name, tensor] : expected) {
    ASSERT_EQ(saved.at(name).sizes(), tensor.sizes()) << name;
    EXPECT_LT((saved.at(name) - tensor).abs().max().item<double>(), 1e-25) << name;
  }
}

// Values and scales: what is read was quantized before. (The step may turn a zero's sign.)
TEST_P(HfOnRanks, Fp8InAndOutIsTheSame) {
  const auto shape = config_with_blocks();
  const TemporaryFolder folder;
  write_hf(folder.path(), published(random_weights(shape)), v3::to_hf_json(shape));
  const LayoutJob job;
  const auto one_step = [&](const Layout& layout, const fs::path& from, const std::string& run) {
    job.train(layout, run,
              {"--model.hf_assets_path", folder.path().string(), "--training.steps", "1",
               "--optimizer.lr", "1e-30", "--moe.bias_update_speed", "0", "--checkpoint.enable",
               "--checkpoint.initial_load_path", from.string(), "--checkpoint.initial_load_in_hf",
               "--checkpoint.initial_load_in_hf_quantized", "--checkpoint.last_save_in_hf",
               "--checkpoint.export_dtype", "float8_e4m3fn"});
    return job.folder() / run / "checkpoint/step-1-hf";
  };
  const fs::path first = one_step(Layout{}, folder.path(), "first");
  const fs::path second = one_step(GetParam(), first, "second");
  const Tensors expected = read_hf(first), saved = read_hf(second);
  const std::string up_proj = "model.layers.1.mlp.experts.5.up_proj.weight";
  EXPECT_EQ(expected.at(up_proj).scalar_type(), at::kFloat8_e4m3fn);
  EXPECT_EQ(expected.at(up_proj + "_scale_inv").sizes(), (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(names_of(saved), names_of(expected));
  for (const auto& [name, tensor] : expected) {
    EXPECT_EQ(saved.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(at::equal(saved.at(name).to(at::kDouble), tensor.to(at::kDouble))) << name;
  }
  EXPECT_EQ(read_file(second / "config.json"), read_file(first / "config.json"));
}

INSTANTIATE_TEST_SUITE_P(Layouts, HfOnRanks,
                         ::testing::Values(Layout{}, Layout{.dp_shard = 4},
                                           Layout{.dp_shard = 2, .tp = 2},
                                           Layout{.dp_replicate = 2, .cp = 2},
                                           Layout{.dp_shard = 4, .ep = 2}),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace longhaul::testing
