#include "longhaul/checkpoint/hf_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/checkpoint/tensor_file.h"
#include "tests/support/log_capture.h"
#include "tests/support/source_folder.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::error_of;
using test::spill;
using test::TempFolder;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kIndex = "model.safetensors.index.json";

class HfFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    save_safetensors(folder_ / "model-00001-of-00002.safetensors", {{"a", a_}, {"b", b_}});
    save_safetensors(folder_ / "model-00002-of-00002.safetensors", {{"c", c_}});
    spill(folder_ / kIndex, R"({"metadata": {"total_size": 1}, "weight_map": {
      "a": "model-00001-of-00002.safetensors",
      "b": "model-00001-of-00002.safetensors",
      "c": "model-00002-of-00002.safetensors"}})");
  }
  std::string open_error() const {
    return error_of<UserError>([&] { HfReader reader(folder_.path()); });
  }

  TempFolder folder_;
  at::Tensor a_ = at::arange(6, at::kFloat).div(7);
  at::Tensor b_ = at::arange(4, at::kFloat).to(at::kBFloat16);
  at::Tensor c_ = at::ones({2, 2}, at::kHalf);
};

TEST_F(HfFolder, ReadsShards) {
  const HfReader reader(folder_.path());
  EXPECT_THAT(reader.names(), ElementsAre("a", "b", "c"));
  EXPECT_EQ(reader.info("c").shape, (std::vector<int64_t>{2, 2}));
  EXPECT_TRUE(at::equal(reader.load("a"), a_));
  EXPECT_TRUE(at::equal(reader.load("b"), b_));
  EXPECT_TRUE(at::equal(reader.load("c"), c_));
  EXPECT_THAT(error_of<UserError>([&] { reader.load("d"); }), HasSubstr("no tensor 'd'"));
}

TEST_F(HfFolder, ReadsRows) {
  const HfReader reader(folder_.path());
  EXPECT_TRUE(at::equal(reader.load_rows("a", 2, 3), a_.narrow(0, 2, 3)));
  EXPECT_TRUE(at::equal(reader.load_rows("c", 1, 1), c_.narrow(0, 1, 1)));
  EXPECT_EQ(reader.load_rows("c", 2, 0).sizes(), (std::vector<int64_t>{0, 2}));
  EXPECT_THAT(error_of<Error>([&] { reader.load_rows("c", 1, 2); }),
              HasSubstr("rows 1 to 3 of 'c' [2, 2]"));
}

TEST_F(HfFolder, MissingShard) {
  fs::remove(folder_ / "model-00002-of-00002.safetensors");
  EXPECT_THAT(open_error(), AllOf(HasSubstr(kIndex), HasSubstr("1 of 2 shards are missing"),
                                  HasSubstr("'model-00002-of-00002.safetensors'")));
}

TEST_F(HfFolder, TensorInTheIndexButNotInTheShard) {
  save_safetensors(folder_ / "model-00001-of-00002.safetensors", {{"a", a_}});
  EXPECT_THAT(open_error(), AllOf(HasSubstr("tensor 'b' should be in"), HasSubstr("00001-of")));
}

TEST_F(HfFolder, TensorsInTheShardsButNotInTheIndexAreNamed) {
  save_safetensors(folder_ / "model-00002-of-00002.safetensors", {{"c", c_}, {"d", c_}, {"e", c_}});
  const test::LogCapture log;
  EXPECT_THAT(HfReader(folder_.path()).names(), ElementsAre("a", "b", "c"));
  EXPECT_THAT(log.text(), HasSubstr("d in model-00002-of-00002.safetensors, "
                                    "e in model-00002-of-00002.safetensors; these are left out"));
}

TEST_F(HfFolder, TruncatedShard) {
  const fs::path shard = folder_ / "model-00001-of-00002.safetensors";
  fs::resize_file(shard, fs::file_size(shard) - 1);
  EXPECT_THAT(open_error(), AllOf(HasSubstr(shard.string()), HasSubstr("truncated")));
}

TEST_F(HfFolder, BadIndex) {
  spill(folder_ / kIndex, "{\"weight_map\": {\"a\": \"x\"");
  EXPECT_THAT(open_error(), HasSubstr("index.json:1: not valid JSON"));
  spill(folder_ / kIndex, "{}");
  EXPECT_THAT(open_error(), HasSubstr("no object 'weight_map'"));
  spill(folder_ / kIndex, R"({"weight_map": {"a": "../outside.safetensors"}})");
  EXPECT_THAT(open_error(), HasSubstr("no file beside it"));
  spill(folder_ / kIndex, R"({"weight_map": {"a": 3}})");
  EXPECT_THAT(open_error(), HasSubstr("no file beside it"));
}

TEST(HfReader, SingleFiles) {
  const TempFolder folder;
  EXPECT_THAT(error_of<UserError>([&] { HfReader reader(folder.path()); }),
              HasSubstr("neither model.safetensors nor model.safetensors.index.json"));
  save_safetensors(folder / "model.safetensors", {{"x", at::ones({3})}});
  EXPECT_TRUE(at::equal(HfReader(folder.path()).load("x"), at::ones({3})));
  EXPECT_TRUE(at::equal(HfReader(folder / "model.safetensors").load("x"), at::ones({3})));
  EXPECT_THROW(HfReader(folder / "other.safetensors"), UserError);
}

// Files that other programs wrote.
TEST(HfReader, GoldenFiles) {
  const fs::path golden = fs::path(test::source_folder()) / "tests/golden";
  const fs::path checkpoint = golden / "hf_base/checkpoint";
  if (!fs::exists(checkpoint)) GTEST_SKIP() << "no reference vectors in " << golden;
  const HfReader reader(checkpoint);
  const at::Tensor embedding = reader.load("model.embed_tokens.weight");
  EXPECT_EQ(embedding.sizes(), (std::vector<int64_t>{320, 128}));
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(golden)) {
    if (entry.path().extension() != ".safetensors") continue;
    EXPECT_FALSE(load_safetensors(entry.path()).empty()) << entry.path();
    ++files;
  }
  EXPECT_GT(files, 0);
}

}  // namespace
}  // namespace longhaul::checkpoint
