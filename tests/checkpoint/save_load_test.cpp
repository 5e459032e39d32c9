#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>

#include "longhaul/base/fault.h"
#include "longhaul/base/hash.h"
#include "longhaul/base/json.h"
#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/manifest.h"
#include "longhaul/checkpoint/step_folder.h"
#include "tests/checkpoint/snapshots.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::error_of;
using test::TempFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(SaveLoad, RoundTrip) {
  const TempFolder folder;
  const Snapshot snapshot = make_snapshot(100);
  const fs::path path = save(folder / "a/b", snapshot);
  EXPECT_EQ(path, folder / "a/b/step-100");
  expect_same(load(path), snapshot);
  expect_same(load(path, false), snapshot);
  EXPECT_THAT(names_in(folder / "a/b"), ElementsAre("step-100"));
  EXPECT_THAT(names_in(path), ElementsAre("manifest.json", "model-00001.safetensors",
                                          "optimizer-00001.safetensors"));
}

TEST(SaveLoad, ShardsAreSplitBySize) {
  const TempFolder folder;
  const Snapshot snapshot = make_snapshot(1);
  const fs::path path = save(folder.path(), snapshot, {.max_shard_bytes = 300});
  int shards = 0;
  for (const auto& name : names_in(path)) shards += name.starts_with("model-");
  EXPECT_GT(shards, 3);
  EXPECT_TRUE(fs::exists(path / "optimizer-00002.safetensors"));
  expect_same(load(path), snapshot);
}

// Tensors of several MiB go through threads, in several files at once.
Snapshot make_large(int64_t step) {
  Snapshot snapshot;
  snapshot.step = step;
  for (int64_t i = 0; i < 12; ++i) {
    const at::Tensor ramp = at::arange(700'001 + 1000 * i, at::kFloat).mul(0.5 + i);
    snapshot.tensors[fmt::format("model.{}", i)] = i % 3 == 0 ? ramp.to(at::kBFloat16) : ramp;
    snapshot.tensors[fmt::format("optimizer.{}", i)] =
        ramp.narrow(0, 0, 700'000).view({700, 1000}).t();
    snapshot.tensors[fmt::format("optimizer.small.{}", i)] = ramp.narrow(0, 5, i);
  }
  return snapshot;
}

TEST(SaveLoad, LargeTensorsInManyFiles) {
  const TempFolder folder;
  const Snapshot snapshot = make_large(3);
  // Told while files are written, when they are all there, and when the folder has its name.
  std::atomic<int> told_before = 0, told_after = 0;
  const auto progress = [&] { fs::exists(folder / "step-3") ? ++told_after : ++told_before; };
  const SaveOptions options{.max_shard_bytes = 7'000'000, .progress = progress};
  const fs::path path = save(folder.path(), snapshot, options);
  const Manifest manifest = read_manifest(path);
  EXPECT_GE(manifest.files.size(), 10u);
  expect_same(load(path), snapshot);
  expect_same(load(path, false), snapshot);
  int64_t pieces = 0;
  for (const auto& [name, tensor] : snapshot.tensors) {
    const at::Tensor contents = tensor.contiguous();
    EXPECT_EQ(manifest.tensors.at(name).checksum,
              hash_hex(contents.const_data_ptr(), contents.nbytes()));
    pieces += ceil_div(static_cast<int64_t>(contents.nbytes()), int64_t{kHashPiece});
  }
  const auto files = static_cast<int64_t>(manifest.files.size());
  EXPECT_EQ(told_before, pieces + files + 2) << "and each of two stages";
  EXPECT_EQ(told_after, 2);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-3"));
}

TEST(SaveLoad, AFullDiskInOneOfManyFilesLeavesNothing) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  const TempFolder folder;
  const Snapshot snapshot = make_large(3);
  for (const char* place : {"checkpoint.tensor:1", "checkpoint.tensor:11", "checkpoint.tensor:36",
                            "file.write:20", "file.sync:2", "checkpoint.shard:9"}) {
    SCOPED_TRACE(place);
    const fault::Armed armed(std::string(place) + ":enospc");
    EXPECT_THAT(
        error_of<UserError>([&] { save(folder.path(), snapshot, {.max_shard_bytes = 7'000'000}); }),
        HasSubstr("no space left on device"));
    EXPECT_TRUE(names_in(folder.path()).empty());
  }
}

TEST(SaveLoad, EmptySnapshot) {
  const TempFolder folder;
  Snapshot snapshot;
  expect_same(load(save(folder.path(), snapshot)), snapshot);
}

TEST(SaveLoad, ManifestVouchesForFilesAndTensors) {
  const TempFolder folder;
  const fs::path path = save(folder.path(), make_snapshot(7));
  const auto json = parse_json(test::slurp(path / kManifestName), "manifest");
  EXPECT_EQ(json["format_version"], 2);
  EXPECT_EQ(json["step"], 7);
  EXPECT_EQ(json["kind"], "full");
  const std::string file = test::slurp(path / "model-00001.safetensors");
  EXPECT_EQ(json["files"]["model-00001.safetensors"]["bytes"], file.size());
  const size_t header_bytes = json["files"]["model-00001.safetensors"]["header_bytes"];
  EXPECT_EQ(json["files"]["model-00001.safetensors"]["checksum"],
            hash_hex(file.substr(0, header_bytes)));
  const auto& tensor = json["tensors"]["model.transposed"];
  EXPECT_EQ(tensor["shape"], (std::vector<int64_t>{20, 3}));
  EXPECT_EQ(tensor["dtype"], "F32");
  const size_t begin = tensor["shards"][0]["begin"], end = tensor["shards"][0]["end"];
  const at::Tensor expected = make_snapshot(7).tensors.at("model.transposed").contiguous();
  EXPECT_EQ(file.substr(begin, end - begin),
            std::string(static_cast<const char*>(expected.const_data_ptr()), expected.nbytes()));
  EXPECT_EQ(tensor["checksum"], hash_hex(expected.const_data_ptr(), expected.nbytes()));
}

TEST(SaveLoad, SavingAStepAgainReplacesIt) {
  const TempFolder folder;
  Snapshot snapshot = make_snapshot(5);
  save(folder.path(), snapshot, {.max_shard_bytes = 300});
  snapshot.tensors.erase("model.bf16");
  snapshot.tensors["model.fp16"] = at::zeros({2}, at::kHalf);
  save(folder.path(), snapshot);
  expect_same(load(folder / "step-5"), snapshot);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-5"));
  EXPECT_THAT(names_in(folder / "step-5"), ElementsAre("manifest.json", "model-00001.safetensors",
                                                       "optimizer-00001.safetensors"));
}

TEST(SaveLoad, ModelOnlyNeverReplacesAFullOne) {
  const TempFolder folder;
  save(folder.path(), make_snapshot(5));
  EXPECT_THAT(error_of<UserError>([&] { save(folder.path(), make_snapshot(5, true)); }),
              HasSubstr("step-5' is a full checkpoint"));
  expect_same(load(folder / "step-5"), make_snapshot(5));
  save(folder.path(), make_snapshot(6, true));
  save(folder.path(), make_snapshot(6));
  expect_same(load(folder / "step-6"), make_snapshot(6));
}

TEST(SaveLoad, RefusesWhatCannotBeSaved) {
  const TempFolder folder;
  Snapshot snapshot = make_snapshot(1);
  snapshot.tensors["model.meta"] = at::empty({2}, at::TensorOptions(at::kMeta));
  EXPECT_THAT(error_of<Error>([&] { save(folder.path(), snapshot); }), HasSubstr("'model.meta'"));
  snapshot = make_snapshot(1);
  snapshot.trainer["job_file"] = "caf\xe9";
  EXPECT_THAT(error_of<UserError>([&] { save(folder.path(), snapshot); }), HasSubstr("UTF-8"));
  snapshot = make_snapshot(1);
  snapshot.model_only = true;
  EXPECT_THAT(error_of<Error>([&] { save(folder.path(), snapshot); }),
              HasSubstr("optimizer.model"));
  snapshot = make_snapshot(-1);
  EXPECT_THROW(save(folder.path(), snapshot), Error);
  EXPECT_TRUE(names_in(folder.path()).empty());
}

// A mistake in it does not cost the time of all tensors.
TEST(SaveLoad, TextThatIsNotUtf8IsFoundBeforeATensorIsWritten) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "no fault points";
  const TempFolder folder;
  Snapshot snapshot = make_snapshot(1);
  snapshot.trainer["job_file"] = "caf\xe9";
  const fault::Trace trace;
  EXPECT_THROW(save(folder.path(), snapshot), UserError);
  EXPECT_THAT(trace.visits(), ::testing::IsEmpty());
}

TEST(SaveLoad, FolderThatCannotBeMade) {
  const TempFolder folder;
  test::spill(folder / "file", "x");
  EXPECT_THAT(error_of<FileError>([&] { save(folder / "file", make_snapshot(1)); }),
              HasSubstr((folder / "file").string()));
}

// Where two folders cannot be exchanged in one move, a save may die between two moves.
TEST(SaveLoad, WhatWasMovedAsideForASaveThatDiedIsPutBack) {
  const TempFolder folder;
  const Snapshot old = make_snapshot(3), other = make_snapshot(4);
  save(folder.path(), old);
  fs::rename(folder / "step-3", folder / ".step-3.tmp-99999999-old");
  save(folder.path(), other);
  fs::create_directory(folder / ".step-4.tmp-99999999-old");  // its new folder came
  save(folder.path(), make_snapshot(5));
  EXPECT_THAT(names_in(folder.path()), ElementsAre("step-3", "step-4", "step-5"));
  expect_same(load(folder / "step-3"), old);
  expect_same(load(folder / "step-4"), other);
}

TEST(SaveLoad, StaleTemporariesAreRemoved) {
  const TempFolder folder;
  // An id above the kernel's limit belongs to nobody; our own is what a restarted container has.
  for (const std::string& name :
       {std::string(".step-3.tmp-99999999"), fmt::format(".step-4.tmp-{}", ::getpid())}) {
    fs::create_directory(folder / name);
    test::spill(folder / (name + "/model-00001.safetensors"), "half");
  }
  fs::create_directory(folder / ".step-3-hf.tmp-99999999");  // of a Hugging Face folder
  for (const char* name : {".step-4.backup", ".mine-hf.tmp-99999999"}) {
    fs::create_directory(folder / name);
  }
  // A save in progress, of another process or of another thread of this one.
  const TemporaryFolder living(folder / "step-9");
  save(folder.path(), make_snapshot(4));
  EXPECT_THAT(names_in(folder.path()), ElementsAre(".mine-hf.tmp-99999999", ".step-4.backup",
                                                   living.path().filename(), "step-4"));
}

}  // namespace
}  // namespace longhaul::checkpoint
