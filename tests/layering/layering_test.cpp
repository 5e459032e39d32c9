// The direction of the includes: a folder includes only itself and folders before it in
// cmake/LonghaulTargets.cmake; models/ sees ops/ and nn/ only; base/, config/ and the kernels see
// no torch.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/source_folder.h"

namespace {

namespace fs = std::filesystem;

std::map<std::string, int> layer_order() {
  std::map<std::string, int> order;
  std::stringstream names(LONGHAUL_LAYERS);
  for (std::string name; std::getline(names, name, ',');) {
    const int next = static_cast<int>(order.size());
    order[name] = next;
  }
  return order;
}

bool is_source(const fs::path& path) {
  const auto extension = path.extension();
  return extension == ".h" || extension == ".cpp" || extension == ".cu";
}

bool is_torch(const std::string& header) {
  return header.starts_with("ATen/") || header.starts_with("torch/") || header.starts_with("c10/");
}

// What stands between the quotes or brackets of a text's #include lines.
std::vector<std::string> includes_of(std::istream& text) {
  static const std::regex include(R"re(^\s*#\s*include\s*["<]([^">]+)[">])re");
  std::vector<std::string> found;
  std::smatch match;
  for (std::string line; std::getline(text, line);) {
    if (std::regex_search(line, match, include)) found.push_back(match[1]);
  }
  return found;
}

// The violations in one file's text, as readable lines.
std::vector<std::string> violations(const std::string& layer, const std::string& name,
                                    std::istream& text, const std::map<std::string, int>& order) {
  std::vector<std::string> found;
  for (const std::string& target : includes_of(text)) {
    if (is_torch(target) && (layer == "base" || layer == "config")) {
      found.push_back(name + " includes " + target + ", but " + layer + "/ knows no torch");
    }
    if (target.rfind("longhaul/", 0) != 0) continue;
    const std::string other = target.substr(9, target.find('/', 9) - 9);
    if (order.count(other) == 0) continue;
    if (order.at(other) > order.at(layer)) {
      found.push_back(name + " includes " + target + ", which comes after " + layer + "/");
    }
    const bool allowed_in_models =
        other == "base" || other == "ops" || other == "nn" || other == "models";
    if (layer == "models" && !allowed_in_models) {
      found.push_back(name + " includes " + target + ", but models/ sees only ops/ and nn/");
    }
  }
  return found;
}

TEST(Layering, IncludesPointUpwards) {
  const auto order = layer_order();
  int files = 0;
  for (const auto& [layer, index] : order) {
    const fs::path folder = fs::path(longhaul::test::source_folder()) / "longhaul" / layer;
    if (!fs::exists(folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      if (!is_source(entry.path())) continue;
      std::ifstream text(entry.path());
      for (const auto& line : violations(layer, entry.path().string(), text, order)) {
        ADD_FAILURE() << line;
      }
      ++files;
    }
  }
  EXPECT_GT(files, 5) << "no sources found under " << longhaul::test::source_folder();
}

// Of the operators' kernels, of what C calls them by, and of all that they include.
TEST(Layering, KernelsKnowNoTorch) {
  const fs::path source = longhaul::test::source_folder(), ops = source / "longhaul/ops";
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(ops)) {
    const fs::path& path = entry.path();
    if (path.extension() != ".cpp" || path.parent_path() == ops) continue;
    const bool kernel = path.filename().string().starts_with("kernel");
    if (kernel || path.parent_path() == ops / "cpu") files.push_back(path);
  }
  EXPECT_GT(files.size(), 20u) << "no kernels found under " << ops;
  for (const char* name : {"c_api.cpp", "c_api_attention.cpp", "isa.cpp", "peak.cpp"}) {
    EXPECT_EQ(std::count(files.begin(), files.end(), ops / "cpu" / name), 1) << name;
  }
  std::set<fs::path> seen(files.begin(), files.end());
  while (!files.empty()) {
    const fs::path file = files.back();
    files.pop_back();
    std::ifstream text(file);
    for (const std::string& target : includes_of(text)) {
      EXPECT_FALSE(is_torch(target)) << file << " includes " << target;
      const fs::path ours = source / target;
      if (fs::exists(ours) && seen.insert(ours).second) files.push_back(ours);
    }
  }
}

// The kernels' interface for C: nothing of ours, of torch or of C++ in it.
TEST(Layering, TheCInterfaceIncludesOnlyC) {
  const std::regex c_header(R"re(<std(bool|def|int)\.h>)re");
  int includes = 0;
  for (const auto& entry :
       fs::recursive_directory_iterator(fs::path(longhaul::test::source_folder()) / "include")) {
    if (!entry.is_regular_file()) continue;
    std::ifstream text(entry.path());
    for (std::string line; std::getline(text, line);) {
      if (line.find("#include") == std::string::npos) continue;
      EXPECT_TRUE(std::regex_search(line, c_header)) << entry.path() << ": " << line;
      ++includes;
    }
  }
  EXPECT_GT(includes, 0);
}

TEST(Layering, AWrongIncludeIsFound) {
  const auto order = layer_order();
  std::istringstream down("#include \"longhaul/train/trainer.h\"\n");
  EXPECT_EQ(violations("ops", "x.cpp", down, order).size(), 1u);
  std::istringstream torch("#include <ATen/ATen.h>\n");
  EXPECT_EQ(violations("config", "x.cpp", torch, order).size(), 1u);
  std::istringstream model("#include \"longhaul/config/job_config.h\"\n");
  EXPECT_EQ(violations("models", "x.cpp", model, order).size(), 1u);
  std::istringstream fine("#include \"longhaul/base/error.h\"\n#include <ATen/ATen.h>\n");
  EXPECT_TRUE(violations("ops", "x.cpp", fine, order).empty());
}

}  // namespace
