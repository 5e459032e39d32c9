#include "longhaul/train/results/starts.h"

#include "tests/results/run_folder.h"

namespace longhaul::train {
namespace {

using nlohmann::ordered_json;

TEST(Starts, ARunThatGoesOnAddsOneAndDropsWhatIsUndone) {
  const test::TempFolder folder;
  const auto path = folder / "environment.json";
  add_start(path, 0, {{"host", "a"}});
  add_start(path, 6, {{"host", "b"}});
  add_start(path, 4, {{"host", "c"}});  // step 7 and what followed are taken again
  const auto starts = read_starts(path);
  ASSERT_EQ(starts.size(), 2u);
  EXPECT_EQ(starts[0]["host"], "a");
  EXPECT_EQ(starts[0]["first_step"], 1);
  EXPECT_EQ(starts[1]["host"], "c");
  EXPECT_EQ(starts[1]["first_step"], 5);
  EXPECT_GT(starts[1]["time"].get<double>(), 1.5e9);
  add_start(path, 0, {{"host", "d"}});  // a new run in the same folder
  ASSERT_EQ(read_starts(path).size(), 1u);
  EXPECT_EQ(read_starts(path)[0]["host"], "d");
}

TEST(Starts, ANameThatIsNotUtf8IsRepaired) {
  const test::TempFolder folder;
  const auto path = folder / "environment.json";
  add_start(path, 0, {{"host", "caf\xE9"}});
  ASSERT_EQ(read_starts(path).size(), 1u);
  EXPECT_EQ(read_starts(path)[0]["host"], "caf\uFFFD");
}

TEST(Starts, WhatIsNoSuchFile) {
  const test::TempFolder folder;
  const auto path = folder / "environment.json";
  EXPECT_EQ(read_starts(path), ordered_json::array());
  for (const char* text : {"", "{", "[]", R"({"starts": 3})", R"({"starts": [1]})"}) {
    test::spill(path, text);
    EXPECT_EQ(read_starts(path), ordered_json::array()) << text;
  }
  test::spill(path, R"({"starts": [{"first_step": "one"}]})");
  add_start(path, 3, ordered_json::object());
  EXPECT_EQ(read_starts(path).size(), 1u);
}

}  // namespace
}  // namespace longhaul::train
