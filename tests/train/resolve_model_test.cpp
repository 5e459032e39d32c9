// Which shape a job gets: flavor, config.json or default.
#include "longhaul/train/resolve_model.h"

#include <gtest/gtest.h>

#include "longhaul/base/error.h"
#include "longhaul/config/load.h"
#include "tests/support/temp_folder.h"

namespace longhaul {
namespace {

class ResolveModel : public ::testing::Test {
 protected:
  // A folder with the config.json of the flavor deepseek_v32/small, 5 layers instead of 4.
  void SetUp() override {
    auto shape = deepseek_v3::find_flavor("deepseek_v32", "small");
    shape.num_hidden_layers = 5;
    test::spill(folder_ / "config.json", deepseek_v3::to_hf_json(shape));
  }

  JobConfig job(Strings words, bool with_assets = true) {
    words.push_back("--model.hf_assets_path=" + (folder_ / (with_assets ? "" : "none")).string());
    return load_job("", words);
  }

  std::string error(const JobConfig& config) {
    return test::error_of<UserError>([&] { resolve_model(config); });
  }

  test::TempFolder folder_;
};

TEST_F(ResolveModel, ANamedFlavorWins) {
  const auto model = resolve_model(job({"--model.name=deepseek_v32", "--model.flavor=tiny"}));
  EXPECT_EQ(model.shape, deepseek_v3::find_flavor("deepseek_v32", "tiny"));
  EXPECT_EQ(model.source, "flavor deepseek_v32/tiny (command line)");
}

TEST_F(ResolveModel, ThenTheFolder) {
  const auto model = resolve_model(job({"--model.name=deepseek_v32"}));
  EXPECT_EQ(model.shape.num_hidden_layers, 5);
  EXPECT_EQ(model.source, (folder_ / "config.json").string());
}

TEST_F(ResolveModel, ThenTheDefaultFlavor) {
  const auto model = resolve_model(job({"--model.name=deepseek_v3"}, false));
  EXPECT_EQ(model.shape, deepseek_v3::find_flavor("deepseek_v3", "debugmodel"));
  EXPECT_EQ(model.source, "flavor deepseek_v3/debugmodel (default)");
}

TEST_F(ResolveModel, SettingsThatReplaceTheShapes) {
  const Strings base = {"--model.name=deepseek_v32", "--model.flavor=671B"};
  EXPECT_EQ(resolve_model(job(base)).shape.num_nextn_predict_layers, 1);
  Strings words = base;
  words.push_back("--mtp.num_modules=0");
  words.push_back("--model.init_std=0.01");
  const auto shape = resolve_model(job(words)).shape;
  EXPECT_EQ(shape.num_nextn_predict_layers, 0);
  EXPECT_EQ(shape.initializer_range, 0.01);
}

TEST_F(ResolveModel, Errors) {
  EXPECT_EQ(error(job({})),
            "default: model.name: \"llama3\" cannot be trained; set it to deepseek_v3 or "
            "deepseek_v32");
  EXPECT_EQ(error(job({"--model.name=deepseek_v32", "--model.flavor=smal"})),
            "command line: model.flavor: deepseek_v32 has no flavor 'smal', did you mean 'small'?; "
            "there are 16B, 50M, 671B, 671B_debug_128die, debugmodel, small, tiny");
  EXPECT_EQ(error(job({"--model.name=deepseek_v3"})),
            (folder_ / "config.json").string() +
                ": has a lightning indexer, but model.name is deepseek_v3 (command line); set it "
                "to deepseek_v32");
  test::spill(folder_ / "config.json", "{}");
  EXPECT_EQ(error(job({"--model.name=deepseek_v32"})),
            (folder_ / "config.json").string() + ": vocab_size: missing");
}

}  // namespace
}  // namespace longhaul
