// Folders for Hugging Face: shards, index, and nothing half done under the final name.
#include "longhaul/checkpoint/hf_writer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>

#include <nlohmann/json.hpp>

#include "longhaul/base/fault.h"
#include "longhaul/checkpoint/hf_reader.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::error_of;
using test::slurp;
using test::TempFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A stack that becomes three tensors, a small one of a wider type, and one that becomes two.
struct Contents {
  Contents() {
    tensors["stack"] = at::arange(24, at::kBFloat16).view({3, 2, 4});
    tensors["bias"] = at::arange(3, at::kFloat);
    tensors["shared"] = at::arange(10, at::kBFloat16);
    folder.items = {
        {"stack",
         {{"e.0", safetensors::DType::kBF16, {2, 4}},
          {"e.1", safetensors::DType::kBF16, {2, 4}},
          {"e.2", safetensors::DType::kBF16, {2, 4}}}},
        {"bias", {{"bias", safetensors::DType::kF32, {3}}}},
        {"shared",
         {{"shared", safetensors::DType::kBF16, {10}}, {"copy", safetensors::DType::kBF16, {10}}}}};
    folder.fetch = [this](const HfItem& item) {
      const at::Tensor tensor = tensors.at(item.name);
      if (item.name == "stack") return std::vector<at::Tensor>{tensor[0], tensor[1], tensor[2]};
      return std::vector<at::Tensor>(item.tensors.size(), tensor);
    };
    folder.texts = [] { return std::map<std::string, std::string>{{"config.json", "{}\n"}}; };
  }
  TensorMap tensors;
  HfFolder folder;
};

std::vector<std::string> files_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

void expect_contents(const fs::path& folder, const Contents& contents) {
  const HfReader reader(folder);
  EXPECT_THAT(reader.names(), ElementsAre("bias", "copy", "e.0", "e.1", "e.2", "shared"));
  for (int64_t e = 0; e < 3; ++e) {
    EXPECT_TRUE(at::equal(reader.load(fmt::format("e.{}", e)), contents.tensors.at("stack")[e]));
  }
  EXPECT_TRUE(at::equal(reader.load("bias"), contents.tensors.at("bias")));
  EXPECT_TRUE(at::equal(reader.load("shared"), contents.tensors.at("shared")));
  EXPECT_TRUE(at::equal(reader.load("copy"), contents.tensors.at("shared")));
}

TEST(HfWriter, OneShard) {
  const TempFolder folder;
  const Contents contents;
  std::vector<int64_t> progress;
  write_hf_folder(folder / "new/out/", contents.folder,
                  {.progress = [&](int64_t bytes) { progress.push_back(bytes); }});
  EXPECT_THAT(files_in(folder / "new"), ElementsAre("out"));
  EXPECT_THAT(files_in(folder / "new/out"),
              ElementsAre("config.json", "model-00001-of-00001.safetensors",
                          "model.safetensors.index.json"));
  expect_contents(folder / "new/out", contents);
  EXPECT_EQ(progress.back(), 100);  // 3 * 16 + 12 + 2 * 20
  EXPECT_EQ(total_bytes(contents.folder), 100);
  const auto index = nlohmann::json::parse(slurp(folder / "new/out/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 100);
  EXPECT_EQ(index["weight_map"]["copy"], "model-00001-of-00001.safetensors");
  const safetensors::Reader file(folder / "new/out/model-00001-of-00001.safetensors");
  EXPECT_EQ(file.header().metadata.at("format"), "pt");
}

TEST(HfWriter, EveryTensorIsAligned) {
  const TempFolder folder;
  HfFolder contents;
  contents.items = {{"odd", {{"odd", safetensors::DType::kBF16, {3}}}},
                    {"wide", {{"wide", safetensors::DType::kF32, {2}}}}};
  contents.fetch = [](const HfItem& item) {
    const auto dtype = item.name == "wide" ? at::kFloat : at::kBFloat16;
    return std::vector<at::Tensor>{at::ones(item.tensors[0].shape, dtype)};
  };
  contents.texts = [] { return std::map<std::string, std::string>{}; };
  write_hf_folder(folder / "out", contents);
  const safetensors::Reader file(folder / "out/model-00001-of-00001.safetensors");
  for (const auto& [name, info] : file.header().tensors) {
    EXPECT_EQ(info.begin % safetensors::dtype_bytes(info.dtype), 0) << name << " is not aligned";
  }
}

// Two pairs of a narrow tensor with a wide one before it, as FP8 weights with scales: `elements` of
// the narrow ones.
HfFolder pairs(int64_t elements, int& fetched) {
  HfFolder contents;
  for (const std::string name : {"a", "b"}) {
    contents.items.push_back({name,
                              {{name + ".wide", safetensors::DType::kF32, {1}},
                               {name + ".narrow", safetensors::DType::kU8, {elements}}}});
  }
  contents.fetch = [&fetched, elements](const HfItem&) {
    ++fetched;
    return std::vector<at::Tensor>(2, at::full({elements}, 7, at::kDouble));
  };
  contents.encode = [](const safetensors::TensorInfo& info, const at::Tensor& tensor) {
    return info.name.ends_with("wide") ? tensor.sum(0, /*keepdim=*/true).to(at::kFloat)
                                       : tensor.to(at::kByte);
  };
  contents.texts = [] { return std::map<std::string, std::string>{}; };
  return contents;
}

TEST(HfWriter, WhatIsEncodedIsFetchedOnceWhereItsTensorsStandTogether) {
  for (const int64_t elements : {8, 7}) {
    const TempFolder folder;
    int fetched = 0;
    write_hf_folder(folder / "out", pairs(elements, fetched));
    EXPECT_EQ(fetched, elements == 8 ? 2 : 4) << "wide ones come first only if they must";
    const HfReader reader(folder / "out");
    for (const std::string name : {"a", "b"}) {
      EXPECT_EQ(reader.load(name + ".wide").item<float>(), 7.0f * static_cast<float>(elements));
      EXPECT_TRUE(at::equal(reader.load(name + ".narrow"), at::full({elements}, 7, at::kByte)));
      EXPECT_EQ(reader.info(name + ".wide").begin % 4, 0);
    }
  }
}

TEST(HfWriter, OnlyTheRankThatWritesEncodes) {
  const TempFolder folder;
  std::atomic<int> encoded = 0;
  test::run_ranks(3, [&](dtensor::World& world) {
    const auto ranks = world.make_group("export", {0, 1, 2});
    int fetched = 0;
    HfFolder own = pairs(8, fetched);
    own.encode = [&, encode = own.encode](const safetensors::TensorInfo& info,
                                          const at::Tensor& tensor) {
      ++encoded;
      return encode(info, tensor);
    };
    write_hf_folder(folder / "out", own, {.min_shard_bytes = 1, .ranks = &ranks});
  });
  EXPECT_EQ(encoded, 4);
  EXPECT_EQ(HfReader(folder / "out").names().size(), 4u);
  // An error of one is an error of all, and leaves nothing.
  std::atomic<int> failures = 0;
  test::run_ranks(3, [&](dtensor::World& world) {
    const auto ranks = world.make_group("export", {0, 1, 2});
    int fetched = 0;
    HfFolder own = pairs(8, fetched);
    own.encode = [](const safetensors::TensorInfo& info, const at::Tensor&) -> at::Tensor {
      fail_user("{} is no number", info.name);
    };
    const HfWriteOptions options = {.min_shard_bytes = 1, .ranks = &ranks};
    EXPECT_THAT(error_of<UserError>([&] { write_hf_folder(folder / "wrong", own, options); }),
                HasSubstr("is no number"));
    ++failures;
  });
  EXPECT_EQ(failures, 3);
  EXPECT_THAT(files_in(folder.path()), ElementsAre("out"));
}

// Shards end within a stack and between copies, and a tensor above the limit has its own.
TEST(HfWriter, AnyLimitGivesTheSameTensors) {
  for (const int64_t limit : {1, 16, 32, 33, 47, 60, 99, 100}) {
    const TempFolder folder;
    const Contents contents;
    write_hf_folder(folder / "out", contents.folder, {.max_shard_bytes = limit});
    expect_contents(folder / "out", contents);
    int64_t shards = 0;
    for (const auto& entry : fs::directory_iterator(folder / "out")) {
      if (entry.path().extension() != ".safetensors") continue;
      const safetensors::Reader file(entry.path());
      int64_t bytes = 0;
      for (const auto& [name, info] : file.header().tensors) bytes += info.bytes();
      EXPECT_TRUE(bytes <= limit || file.header().tensors.size() == 1) << limit;
      ++shards;
    }
    EXPECT_EQ(shards, limit == 1 ? 6 : limit == 100 ? 1 : shards);
    EXPECT_TRUE(fs::exists(folder / fmt::format("out/model-00001-of-{:05}.safetensors", shards)));
  }
}

TEST(HfWriter, RefusesToOverwriteUnlessAsked) {
  const TempFolder folder;
  Contents contents;
  fs::create_directory(folder / "out");
  test::spill(folder / "out/mine", "x");
  EXPECT_THAT(error_of<UserError>([&] { write_hf_folder(folder / "out", contents.folder); }),
              HasSubstr("is there already"));
  EXPECT_EQ(slurp(folder / "out/mine"), "x");
  write_hf_folder(folder / "out", contents.folder, {.replace = true});
  EXPECT_FALSE(fs::exists(folder / "out/mine"));
  contents.tensors["bias"].add_(1);
  write_hf_folder(folder / "out", contents.folder, {.replace = true});
  expect_contents(folder / "out", contents);
  EXPECT_THAT(files_in(folder.path()), ElementsAre("out"));
}

// At each place where it can fail, the folder that was there stays as it was.
TEST(HfWriter, AFailureLeavesNothing) {
  if (!fault::kCompiledIn) GTEST_SKIP() << "no fault points";
  const TempFolder folder;
  Contents contents;
  write_hf_folder(folder / "out", contents.folder);
  const Contents before = contents;
  contents.tensors["bias"] = contents.tensors["bias"] + 1;
  std::vector<std::string> visits;
  {
    const TempFolder other;
    const fault::Trace trace;
    write_hf_folder(other / "out", contents.folder);
    visits = trace.visits();
  }
  ASSERT_GE(visits.size(), 8u);  // a tensor each, index, rename, and those of files
  for (const auto& visit : visits) {
    const fault::Armed armed(visit + ":throw");
    EXPECT_ANY_THROW(write_hf_folder(folder / "out", contents.folder, {.replace = true})) << visit;
    EXPECT_THAT(files_in(folder.path()), ElementsAre("out")) << visit;
    expect_contents(folder / "out", before);
  }
}

TEST(HfWriter, WhatADeadProcessHasLeftGoesWhatALivingOneHoldsStays) {
  const TempFolder folder;
  const Contents contents;
  fs::create_directory(folder / ".out.tmp-1");
  fs::create_directory(folder / ".out.tmp-2");
  fs::create_directory(folder / ".other.tmp-1");
  const int held = ::open((folder / ".out.tmp-2").c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(::flock(held, LOCK_EX), 0);
  write_hf_folder(folder / "out", contents.folder);
  ::close(held);
  EXPECT_THAT(files_in(folder.path()), ElementsAre(".other.tmp-1", ".out.tmp-2", "out"));
}

TEST(HfWriter, WhatWasLeftUnderOtherNamesGoesIfAsked) {
  const TempFolder folder;
  const Contents contents;
  for (const char* name : {".step-1-hf.tmp-1", ".step-2-hf.tmp-1", ".step-2.tmp-1"}) {
    fs::create_directory(folder / name);
  }
  write_hf_folder(folder / "out", contents.folder,
                  {.clears = [](const std::string& name) { return name == "step-2-hf"; }});
  EXPECT_THAT(files_in(folder.path()), ElementsAre(".step-1-hf.tmp-1", ".step-2.tmp-1", "out"));
}

// Before a byte is written, so that a mistake in them does not cost the time of all tensors.
TEST(HfWriter, TheTextsComeFirst) {
  const TempFolder folder;
  Contents contents;
  int fetched = 0;
  contents.folder.fetch = [&](const HfItem&) -> std::vector<at::Tensor> {
    ++fetched;
    fail_user("too late");
  };
  contents.folder.texts = []() -> std::map<std::string, std::string> {
    fail_user("config.json is broken");
  };
  EXPECT_THAT(error_of<UserError>([&] { write_hf_folder(folder / "out", contents.folder); }),
              HasSubstr("config.json is broken"));
  std::atomic<int> failures = 0;
  test::run_ranks(2, [&](dtensor::World& world) {
    const auto ranks = world.make_group("export", {0, 1});
    const HfWriteOptions options = {.ranks = &ranks};
    EXPECT_THAT(
        error_of<UserError>([&] { write_hf_folder(folder / "out", contents.folder, options); }),
        HasSubstr("config.json is broken"));
    ++failures;
  });
  EXPECT_EQ(failures, 2);
  EXPECT_EQ(fetched, 0);
  EXPECT_TRUE(files_in(folder.path()).empty());
}

// All ranks fetch in the same order, and each writes its share; a failure of one is everybody's.
TEST(HfWriter, OnRanks) {
  const TempFolder folder;
  const Contents contents;
  const auto write = [&](dtensor::World& world, const std::string& name) {
    const auto ranks = world.make_group("export", {0, 1, 2});
    HfFolder own = contents.folder;
    own.fetch = [&](const HfItem& item) {
      auto tensors = contents.folder.fetch(item);
      for (auto& tensor : tensors) {
        // Each rank has a third; without the others the sum is wrong.
        tensor = (world.rank() == 1 ? tensor : at::zeros_like(tensor)).contiguous().clone();
        ranks.all_reduce(tensor, dtensor::Reduction::kSum).wait();
      }
      return tensors;
    };
    write_hf_folder(folder / name, own, {.max_shard_bytes = 40, .ranks = &ranks});
    // Small files are worth it only where the options say so: then each rank has one.
    write_hf_folder(folder / (name + "-whole"), own, {.replace = true, .ranks = &ranks});
    write_hf_folder(folder / (name + "-cut"), own,
                    {.min_shard_bytes = 1, .replace = true, .ranks = &ranks});
  };
  test::run_ranks(3, [&](dtensor::World& world) { write(world, "out"); });
  expect_contents(folder / "out", contents);
  EXPECT_TRUE(fs::exists(folder / "out/model-00003-of-00003.safetensors"));
  expect_contents(folder / "out-whole", contents);
  EXPECT_TRUE(fs::exists(folder / "out-whole/model-00001-of-00001.safetensors"));
  expect_contents(folder / "out-cut", contents);
  EXPECT_GE(HfReader(folder / "out-cut").files().size(), 3u);
  for (const char* name : {"out-whole", "out-cut"}) fs::remove_all(folder / name);
  if (fault::kCompiledIn) {
    const fault::Armed armed("hf_folder.shard:2:enospc");
    EXPECT_THAT(error_of<Error>([&] {
                  test::run_ranks(3, [&](dtensor::World& world) { write(world, "full"); });
                }),
                HasSubstr("No space left on device"));
    EXPECT_THAT(files_in(folder.path()), ElementsAre("out"));
  }
  for (const char* name : {"in_a_file/out", "out"}) {
    test::spill(folder / "in_a_file", "");
    std::atomic<int> failures = 0;
    test::run_ranks(3, [&](dtensor::World& world) {
      const std::string error = error_of<UserError>([&] { write(world, name); });
      EXPECT_THAT(error, HasSubstr(world.rank() == 0 ? "'" : "rank 0: "));
      ++failures;
    });
    EXPECT_EQ(failures, 3);
  }
}

}  // namespace
}  // namespace longhaul::checkpoint
