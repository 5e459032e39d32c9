#include "longhaul/checkpoint/tools.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "longhaul/base/hash.h"
#include "tests/checkpoint/snapshots.h"
#include "tests/support/log_capture.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::error_of;
using test::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string hash_of(const at::Tensor& tensor) {
  const at::Tensor host = tensor.contiguous();
  return hash_hex(host.const_data_ptr(), host.nbytes());
}

TEST(Show, OursAsJson) {
  const TempFolder folder;
  const Snapshot snapshot = make_snapshot(8);
  save(folder.path(), make_snapshot(7));
  save(folder.path(), snapshot, {.max_shard_bytes = 300});
  const auto json = to_json(show(folder.path(), true));  // the newest
  EXPECT_EQ(json["path"], (folder / "step-8").string());
  EXPECT_EQ(json["format"], "longhaul");
  EXPECT_EQ(json["step"], 8);
  EXPECT_EQ(json["kind"], "full");
  ASSERT_EQ(json["tensors"].size(), snapshot.tensors.size());
  for (const auto& row : json["tensors"]) {
    const at::Tensor& tensor = snapshot.tensors.at(row["name"]);
    EXPECT_EQ(row["shape"], tensor.sizes().vec());
    EXPECT_EQ(row["checksum"], hash_of(tensor)) << row["name"];
  }
}

// The checksum depends on the contents alone, not on the kind of file or the shards.
TEST(Show, ChecksumsCompareAcrossFormats) {
  const TempFolder folder;
  Snapshot snapshot;
  snapshot.tensors["w"] = at::arange(9, at::kFloat).reshape({3, 3}).t();
  save(folder / "ours", snapshot);
  save_safetensors(folder / "hf.safetensors", snapshot.tensors);
  const auto ours = to_json(show(folder / "ours", true));
  const auto theirs = to_json(show(folder / "hf.safetensors", true));
  EXPECT_EQ(ours["tensors"], theirs["tensors"]);
  EXPECT_FALSE(theirs.contains("step"));
}

TEST(Show, Text) {
  const TempFolder folder;
  Snapshot snapshot;
  snapshot.step = 3;
  snapshot.tensors["model.w"] = at::zeros({100, 64}, at::kBFloat16);
  snapshot.tensors["optimizer.model.w.exp_avg"] = at::zeros({100, 64});
  save(folder.path(), snapshot);
  EXPECT_EQ(to_text(show(folder / "step-3", false)),
            (folder / "step-3").string() +
                ": step 3, full\n"
                "name                       dtype    shape            size\n"
                "model.w                    BF16     [100, 64]    12.5 KiB\n"
                "optimizer.model.w.exp_avg  F32      [100, 64]    25.0 KiB\n"
                "model: 1 tensors, 6,400 values, 12.5 KiB\n"
                "optimizer: 1 tensors, 6,400 values, 25.0 KiB\n");
}

// Of the numbers in the names one belongs to a copy; a damaged one is still what its name says.
TEST(Show, TheNewestIsOneThatIsWhatItsNameSays) {
  const TempFolder folder;
  for (const int step : {7, 100}) save(folder.path(), make_snapshot(step));
  fs::copy(folder / "step-7", folder / "step-10000", fs::copy_options::recursive);
  const test::LogCapture log;
  EXPECT_EQ(show(folder.path(), false).path, folder / "step-100");
  EXPECT_THAT(log.text(), AllOf(HasSubstr("step-10000"), HasSubstr("its manifest says step 7")));
  EXPECT_EQ(verify(folder.path()).path, folder / "step-100");
  EXPECT_EQ(show(folder / "step-10000", false).step, 7);  // named by the user
  fs::remove(folder / "step-100/manifest.json");
  EXPECT_EQ(verify(folder.path()).path, folder / "step-100");
  for (const char* name : {"step-100", "step-7"}) fs::remove_all(folder / name);
  EXPECT_EQ(show(folder.path(), false).path, folder / "step-10000");
}

TEST(Show, PathsThatHoldNothing) {
  const TempFolder folder;
  EXPECT_THAT(error_of<UserError>([&] { show(folder / "none", false); }),
              HasSubstr("does not exist"));
  EXPECT_THAT(error_of<UserError>([&] { show(folder.path(), false); }),
              HasSubstr("is no checkpoint"));
}

class Diff : public ::testing::Test {
 protected:
  std::vector<Difference> of(const TensorMap& a, const TensorMap& b, Tolerance tolerance = {}) {
    save_safetensors(folder_ / "a", a);
    save_safetensors(folder_ / "b", b);
    return diff(folder_ / "a", folder_ / "b", tolerance);
  }
  TempFolder folder_;
};

TEST_F(Diff, EqualTensors) {
  const TensorMap all = make_snapshot(1).tensors;
  EXPECT_THAT(of(all, all), IsEmpty());
  const TensorMap nan = {{"x", at::full({2}, std::nan(""))}};
  EXPECT_THAT(of(nan, nan), IsEmpty());
}

TEST_F(Diff, MissingOnEitherSide) {
  const auto found =
      of({{"x", at::ones(1)}, {"y", at::ones(1)}}, {{"y", at::ones(1)}, {"z", at::ones(1)}});
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].name + ": " + found[0].what, "x: only in A");
  EXPECT_EQ(found[1].name + ": " + found[1].what, "z: only in B");
}

TEST_F(Diff, ShapesAndDtypes) {
  const auto shapes = of({{"x", at::ones({2, 3})}}, {{"x", at::ones({3, 2})}});
  ASSERT_EQ(shapes.size(), 1u);
  EXPECT_EQ(shapes[0].what, "shape [2, 3] in A, [3, 2] in B");
  const auto dtypes = of({{"x", at::ones(2)}}, {{"x", at::ones(2, at::kBFloat16)}});
  ASSERT_EQ(dtypes.size(), 1u);
  EXPECT_EQ(dtypes[0].what, "dtype F32 in A, BF16 in B");
  EXPECT_FALSE(dtypes[0].max_absolute);
}

TEST_F(Diff, LargestDeviations) {
  const at::Tensor a = at::tensor({1.0, 2.0, -100.0, 0.0}, at::kDouble);
  const at::Tensor b = at::tensor({1.0, 2.5, -101.0, 0.25}, at::kDouble);
  const auto found = of({{"x", a}}, {{"x", b}});
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].what, "3 of 4 values differ");
  EXPECT_EQ(found[0].max_absolute, 1.0);
  EXPECT_EQ(found[0].max_relative, 1.0);  // 0 against 0.25
  EXPECT_EQ(of({{"x", a}}, {{"x", b}}, {.relative = 0.01, .absolute = 0.25})[0].what,
            "1 of 4 values differ");
  EXPECT_THAT(of({{"x", a}}, {{"x", b}}, {.relative = 0, .absolute = 1}), IsEmpty());
}

TEST_F(Diff, TinyAndHugeDifferencesAreSeen) {
  const int64_t big = int64_t{1} << 60;
  EXPECT_EQ(of({{"x", at::tensor({big})}}, {{"x", at::tensor({big + 1})}}).size(), 1u);
  const double one = 1, next = std::nextafter(1.0, 2.0);
  EXPECT_EQ(
      of({{"x", at::tensor({one}, at::kDouble)}}, {{"x", at::tensor({next}, at::kDouble)}}).size(),
      1u);
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(of({{"x", at::tensor({inf})}}, {{"x", at::tensor({1.0f})}}, {.absolute = 1e9}).size(),
            1u);
  EXPECT_EQ(of({{"x", at::tensor({1.0f})}}, {{"x", at::tensor({inf})}}, {.relative = 1}).size(),
            1u);
  const auto nan =
      of({{"x", at::tensor({std::nanf("")})}}, {{"x", at::tensor({1.0f})}}, {.absolute = 1});
  ASSERT_EQ(nan.size(), 1u);
  EXPECT_TRUE(std::isnan(*nan[0].max_absolute));
}

TEST_F(Diff, LongTensorsAreComparedToTheEnd) {
  const at::Tensor a = at::zeros({(1 << 20) * 2 + 3});
  at::Tensor b = a.clone();
  b[-1] = 0.5;
  const auto found = of({{"x", a}}, {{"x", b}});
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].what, "1 of 2097155 values differ");
  EXPECT_EQ(found[0].max_absolute, 0.5);
}

TEST_F(Diff, Fp8) {
  const at::Tensor a = at::arange(8, at::kFloat).to(at::kFloat8_e4m3fn);
  const at::Tensor b = at::arange(8, at::kFloat).add(1).to(at::kFloat8_e4m3fn);
  EXPECT_THAT(of({{"x", a}}, {{"x", a}}), IsEmpty());
  EXPECT_EQ(of({{"x", a}}, {{"x", b}})[0].what, "8 of 8 values differ");
}

TEST(Verify, NamesWhatIsDamaged) {
  const TempFolder folder;
  save(folder.path(), make_snapshot(1));
  EXPECT_THAT(verify(folder.path()).problems, IsEmpty());
  EXPECT_TRUE(verify(folder.path()).has_checksums);
  test::flip_byte(folder / "step-1/model-00001.safetensors",
                  fs::file_size(folder / "step-1/model-00001.safetensors") - 1);
  const auto report = verify(folder.path());
  EXPECT_EQ(report.path, folder / "step-1");
  ASSERT_EQ(report.problems.size(), 1u);
  EXPECT_THAT(report.problems[0], AllOf(HasSubstr("model-00001"), HasSubstr("tensor 'model.")));
}

TEST(Verify, HuggingFaceFiles) {
  const TempFolder folder;
  save_safetensors(folder / "model.safetensors", {{"x", at::ones(3)}});
  EXPECT_THAT(verify(folder.path()).problems, IsEmpty());
  EXPECT_FALSE(verify(folder.path()).has_checksums);
  fs::resize_file(folder / "model.safetensors", 40);
  EXPECT_EQ(verify(folder.path()).problems.size(), 1u);
}

}  // namespace
}  // namespace longhaul::checkpoint
