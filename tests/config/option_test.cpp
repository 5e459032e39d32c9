// The option table against the list of TorchTitan 0.2.1's and the recipe's keys.
#include "longhaul/config/option.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>

#include "longhaul/config/write.h"
#include "tests/support/source_folder.h"

namespace longhaul {
namespace {

std::vector<Strings> table_rows(const std::string& name) {
  std::ifstream file(test::source_folder() + "/tests/config/data/" + name);
  std::vector<Strings> rows;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) continue;
    Strings cells;
    std::stringstream text(line);
    for (std::string cell; std::getline(text, cell, '\t');) cells.push_back(cell);
    rows.push_back(cells);
  }
  return rows;
}

std::string default_text(const Option& option) {
  const std::string text = toml_text(option.default_value());
  return text.empty() ? "not set" : text;
}

// 0.0008 and 8e-4 are one default.
bool same_default(const std::string& type, const std::string& a, const std::string& b) {
  return type == "float" ? std::stod(a) == std::stod(b) : a == b;
}

TEST(Options, EveryKeyOfTorchTitanWithTypeDefaultAndChoices) {
  const auto rows = table_rows("torchtitan_keys.tsv");
  ASSERT_GT(rows.size(), 140u);
  // Wider here than there: an empty string stands for no file, float64, FP8 blocks.
  const std::set<std::string> wider = {"parallelism.pipeline_parallel_schedule_csv",
                                       "training.dtype", "checkpoint.export_dtype"};
  for (const auto& row : rows) {
    const Option* option = find_option(row[0]);
    ASSERT_TRUE(option) << row[0];
    EXPECT_TRUE(same_default(row[1], default_text(*option), row[2]))
        << row[0] << ": " << default_text(*option) << " is not " << row[2];
    EXPECT_EQ(to_string(option->provenance), row[4]) << row[0];
    if (wider.count(row[0])) continue;
    EXPECT_EQ(option->type_name(), row[1]) << row[0];
    const std::string choices = row[3].empty() ? option->limits.text() : row[3];
    EXPECT_EQ(option->limits.text(), choices) << row[0];
  }
}

TEST(Options, OnlyOurOwnKeysAreNotInThatList) {
  std::set<std::string> listed;
  for (const auto& row : table_rows("torchtitan_keys.tsv")) listed.insert(row[0]);
  std::set<std::string> seen;
  for (const auto& option : options()) {
    EXPECT_TRUE(seen.insert(option.key).second) << option.key << " stands twice";
    EXPECT_FALSE(option.help.empty()) << option.key;
    EXPECT_EQ(listed.count(option.key) == 0, option.provenance == Provenance::kLonghaul)
        << option.key;
  }
}

TEST(Options, TheDocumentationIsCurrent) {
  std::ifstream file(test::source_folder() + "/docs/config.md");
  std::stringstream text;
  text << file.rdbuf();
  EXPECT_TRUE(text.str() == keys_markdown())
      << "docs/config.md is stale; run: build/release/bin/longhaul config keys --markdown > "
         "docs/config.md";
}

TEST(Options, KeysText) {
  const std::string text = keys_text("training.num");
  EXPECT_EQ(text, "");
  EXPECT_EQ(keys_text("mtp.num_modules"),
            "mtp.num_modules  (int, optional, default not set; >= 0)\n"
            "    Multi-token prediction depth; default: the shape's num_nextn_predict_layers. Also "
            "training.num_mtp_modules.\n");
}

}  // namespace
}  // namespace longhaul
