// The documents point at code that is there: each link's file exists, and a link whose text is a
// code name finds that name in the file.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>

#include "tests/support/source_folder.h"

namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// The links of one Markdown text that lead nowhere, as readable lines.
std::vector<std::string> broken_links(const std::string& text, const fs::path& folder,
                                      int* checked) {
  static const std::regex link(R"(\[(`?)([^\]`]+)`?\]\(([^)#:\s]+)\))");
  std::vector<std::string> broken;
  for (std::sregex_iterator it(text.begin(), text.end(), link), end; it != end; ++it) {
    const bool is_code = (*it)[1].length() > 0;
    const std::string name = (*it)[2], target = (*it)[3];
    const fs::path path = folder / target;
    ++*checked;
    if (!fs::exists(path)) {
      broken.push_back(target + " does not exist");
    } else if (is_code && read(path).find(name) == std::string::npos) {
      broken.push_back(name + " is not in " + target);
    }
  }
  return broken;
}

TEST(Docs, EveryLinkLeadsToWhatItNames) {
  const fs::path root = longhaul::test::source_folder();
  std::vector<fs::path> pages = {root / "README.md"};
  for (const auto& entry : fs::directory_iterator(root / "docs")) {
    if (entry.path().extension() == ".md") pages.push_back(entry.path());
  }
  int checked = 0;
  for (const auto& page : pages) {
    for (const auto& line : broken_links(read(page), page.parent_path(), &checked)) {
      ADD_FAILURE() << page.filename().string() << ": " << line;
    }
  }
  EXPECT_GT(checked, 30);
}

TEST(Docs, ABrokenLinkIsFound) {
  const fs::path docs = fs::path(longhaul::test::source_folder()) / "docs";
  int checked = 0;
  EXPECT_EQ(broken_links("see [`no_such_name`](step.md)", docs, &checked).size(), 1u);
  EXPECT_EQ(broken_links("see [page](no-such-page.md)", docs, &checked).size(), 1u);
  EXPECT_TRUE(broken_links("see [page](step.md)", docs, &checked).empty());
  EXPECT_EQ(checked, 3);
}

}  // namespace
