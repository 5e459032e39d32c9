// Everything that can be wrong with a checkpoint on disk, and what load() and find_damage() say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/base/hash.h"
#include "longhaul/base/json.h"
#include "longhaul/checkpoint/checkpoint.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "tests/checkpoint/snapshots.h"
#include "tests/support/temp_folder.h"

namespace longhaul::checkpoint {
namespace {

using test::error_of;
using test::flip_byte;
using test::slurp;
using test::spill;
using ::testing::AllOf;
using ::testing::HasSubstr;

class Damage : public ::testing::Test {
 protected:
  void SetUp() override { step_ = save(folder_.path(), make_snapshot(100)); }
  fs::path file(const std::string& name) const { return step_ / name; }
  std::string load_error() const {
    return error_of<UserError>([&] { load(step_); });
  }
  // Writes a manifest that `change` has altered, with a checksum that holds.
  template <typename Change>
  void forge_manifest(Change&& change) {
    auto json = parse_json(slurp(file(kManifestName)), "manifest");
    json.erase("checksum");
    change(json);
    json["checksum"] = hash_hex(json.dump());
    spill(file(kManifestName), json.dump());
  }

  test::TempFolder folder_;
  fs::path step_;
};

TEST_F(Damage, NoneIsFoundInAGoodOne) { EXPECT_TRUE(find_damage(step_).empty()); }

TEST_F(Damage, FlippedByteInEachTensor) {
  const Manifest manifest = read_manifest(step_);
  for (const auto& [name, entry] : manifest.tensors) {
    if (entry.extent.begin == entry.extent.end) continue;
    const fs::path path = file(entry.extent.file);
    for (const int64_t place : {entry.extent.begin, entry.extent.end - 1}) {
      flip_byte(path, static_cast<size_t>(place));
      EXPECT_THAT(load_error(), AllOf(HasSubstr("'" + path.string() + "'"),
                                      HasSubstr("tensor '" + name + "'"), HasSubstr("checksum")));
      flip_byte(path, static_cast<size_t>(place));
    }
  }
  expect_same(load(step_), make_snapshot(100));
}

TEST_F(Damage, FlippedByteAnywhereInTheHeader) {
  const fs::path path = file("model-00001.safetensors");
  const auto start = static_cast<size_t>(safetensors::Reader(path).header().data_start);
  for (size_t place = 0; place < start; place += 7) {
    flip_byte(path, place);
    EXPECT_THAT(load_error(), HasSubstr(path.string())) << place;
    flip_byte(path, place);
  }
}

TEST_F(Damage, FlippedByteAnywhereInTheManifest) {
  const fs::path path = file(kManifestName);
  const Snapshot good = make_snapshot(100);
  const size_t size = fs::file_size(path);
  int rejected = 0;
  for (size_t place = 0; place < size; place += 11) {
    flip_byte(path, place);
    try {
      expect_same(load(step_), good);  // a byte of white space
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), HasSubstr(path.string())) << place;
      ++rejected;
    }
    flip_byte(path, place);
  }
  EXPECT_GT(rejected, 100);
}

TEST_F(Damage, TruncatedShard) {
  const fs::path path = file("optimizer-00001.safetensors");
  const auto size = fs::file_size(path);
  for (const auto left : {size - 1, size / 2, uintmax_t{3}, uintmax_t{0}}) {
    fs::resize_file(path, left);
    EXPECT_THAT(load_error(), AllOf(HasSubstr(path.string()), HasSubstr("truncated"),
                                    HasSubstr(fmt::format("{} bytes instead of {}", left, size))));
  }
  fs::resize_file(path, size + 1);
  EXPECT_THAT(load_error(), HasSubstr("is damaged"));
}

TEST_F(Damage, MissingShard) {
  fs::remove(file("model-00001.safetensors"));
  EXPECT_THAT(load_error(), AllOf(HasSubstr("model-00001.safetensors' is missing"),
                                  HasSubstr("another checkpoint")));
}

TEST_F(Damage, AllProblemsAreListed) {
  fs::remove(file("model-00001.safetensors"));
  const TensorEntry entry =
      read_manifest(step_).tensors.at("optimizer.model.embed_tokens.weight.exp_avg");
  flip_byte(file("optimizer-00001.safetensors"), static_cast<size_t>(entry.extent.begin));
  const auto problems = find_damage(step_);
  ASSERT_EQ(problems.size(), 2u);
  EXPECT_THAT(problems[0], HasSubstr("model-00001"));
  EXPECT_THAT(problems[1], HasSubstr("exp_avg'"));
}

TEST_F(Damage, ShardOfAnotherStep) {
  save(folder_.path(), make_snapshot(101));
  fs::copy_file(folder_ / "step-101/model-00001.safetensors", file("model-00001.safetensors"),
                fs::copy_options::overwrite_existing);
  EXPECT_THAT(load_error(), HasSubstr("does not match its checksum"));
}

TEST_F(Damage, ManifestGarbage) {
  const fs::path path = file(kManifestName);
  const auto with = [&](const std::string& text) {
    spill(path, text);
    return load_error();
  };
  const std::string good = slurp(path);
  EXPECT_THAT(with(""), HasSubstr("manifest.json:1: not valid JSON"));
  EXPECT_THAT(with(good.substr(0, good.size() / 2)), HasSubstr("not valid JSON"));
  EXPECT_THAT(with("[1, 2]"), HasSubstr("no manifest of a longhaul checkpoint"));
  EXPECT_THAT(with("{}"), HasSubstr("no manifest of a longhaul checkpoint"));
  EXPECT_THAT(with(std::string(1000, '\0')), HasSubstr("not valid JSON"));
  fs::remove(path);
  EXPECT_THAT(load_error(), HasSubstr("no complete checkpoint"));
  EXPECT_THAT(error_of<UserError>([&] { load(folder_ / "step-7"); }), HasSubstr("step-7"));
}

TEST_F(Damage, ManifestOfANewerFormat) {
  forge_manifest([](auto& json) { json["format_version"] = 3; });
  EXPECT_THAT(load_error(), HasSubstr("written in format 3, this longhaul reads formats 1 to 2"));
}

// There a file's checksum was of all its bytes.
TEST_F(Damage, ManifestOfTheFirstFormatIsRead) {
  forge_manifest([&](auto& json) {
    json["format_version"] = 1;
    for (auto& [name, entry] : json["files"].items()) {
      entry.erase("header_bytes");
      entry["checksum"] = hash_hex(slurp(file(name)));
    }
  });
  expect_same(load(step_), make_snapshot(100));
  const std::string name = "model-00001.safetensors";
  for (const uintmax_t place : {uintmax_t{20}, fs::file_size(file(name)) - 1}) {
    flip_byte(file(name), place);
    EXPECT_THAT(load_error(), HasSubstr(name));
    flip_byte(file(name), place);
  }
}

// Every byte of a file is in its header or in a tensor that the manifest names.
TEST_F(Damage, ManifestThatLeavesBytesWithoutAChecksum) {
  const std::string good = slurp(file(kManifestName));
  forge_manifest([](auto& json) { json["tensors"].erase("model.fp64"); });
  EXPECT_THAT(load_error(), HasSubstr("holds what the manifest does not name"));
  spill(file(kManifestName), good);
  forge_manifest([](auto& json) { json["files"]["model-00001.safetensors"]["header_bytes"] = 8; });
  EXPECT_THAT(load_error(), HasSubstr("holds what the manifest does not name"));
}

TEST_F(Damage, ManifestThatContradictsItselfOrTheFiles) {
  const std::string good = slurp(file(kManifestName));
  const auto with = [&](auto change) {
    spill(file(kManifestName), good);
    forge_manifest(change);
    return load_error();
  };
  const auto shard = [](auto& json) -> auto& { return json["tensors"]["model.fp64"]["shards"][0]; };
  EXPECT_THAT(with([](auto& json) { json["step"] = "x"; }), HasSubstr("manifest.json"));
  EXPECT_THAT(with([](auto& json) { json.erase("files"); }), HasSubstr("'files'"));
  EXPECT_THAT(with([](auto& json) { json["kind"] = "half"; }), HasSubstr("'half'"));
  EXPECT_THAT(with([&](auto& json) { shard(json)["file"] = "other"; }),
              HasSubstr("tensor 'model.fp64': its file 'other' is not listed"));
  EXPECT_THAT(with([&](auto& json) { shard(json)["end"] = 1 << 30; }), HasSubstr("lie outside"));
  EXPECT_THAT(with([](auto& json) {
                json["tensors"]["model.fp64"]["shape"] = {-1, 2};
              }),
              HasSubstr("'model.fp64'"));
  EXPECT_THAT(with([](auto& json) {
                json["tensors"]["model.fp64"]["shape"] = {20, 3};
              }),
              HasSubstr("tensor 'model.fp64' is F64 [3, 20] at byte"));
  EXPECT_THAT(with([](auto& json) { json["tensors"]["model.int64"]["dtype"] = "F64"; }),
              HasSubstr("tensor 'model.int64' is I64"));
  EXPECT_THAT(
      with([](auto& json) { json["tensors"]["model.new"] = json["tensors"]["model.fp64"]; }),
      HasSubstr("no tensor 'model.new'"));
  EXPECT_THAT(with([](auto& json) {
                json["files"]["../../x"] = {{"bytes", 1}, {"checksum", ""}};
              }),
              HasSubstr("'../../x' is no name of a file in this folder"));
}

// A manifest that is there and cannot be read is no missing one.
TEST_F(Damage, AManifestThatCannotBeReadIsToldWithTheReason) {
  fs::remove(file(kManifestName));
  EXPECT_THAT(load_error(), HasSubstr("it is no complete checkpoint"));
  fs::create_symlink(kManifestName, file(kManifestName));  // to itself
  EXPECT_THAT(load_error(), AllOf(HasSubstr(file(kManifestName).string()),
                                  HasSubstr("Too many levels of symbolic links")));
}

}  // namespace
}  // namespace longhaul::checkpoint
