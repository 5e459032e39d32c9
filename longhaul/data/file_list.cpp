#include "longhaul/data/file_list.h"

#include <glob.h>

#include <algorithm>
#include <numeric>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"

namespace longhaul::data {
namespace {

namespace fs = std::filesystem;

bool is_hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

[[noreturn]] void fail_list(const fs::path& path, const std::error_code& code) {
  fail_user("cannot list '{}': {}", path.string(), code.message());
}

void add_folder(const fs::path& folder, std::vector<CorpusFile>& files) {
  std::vector<CorpusFile> found, left_out;
  fs::path last = folder;  // whose entries the iterator reads next; its own error does not say
  std::error_code error;
  for (auto entry = fs::recursive_directory_iterator(folder);
       entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    last = entry->path();
    if (is_hidden(entry->path())) {
      if (entry->is_directory()) entry.disable_recursion_pending();
    } else if (entry->is_regular_file()) {
      found.push_back({entry->path(), entry->file_size()});
    } else if (entry->is_symlink() || !entry->is_directory()) {
      left_out.push_back({entry->path(), 0});
    }
  }
  if (error) fail_list(last, error);
  if (!left_out.empty()) {
    log::warn(
        "'{}': {} entries are left out, such as '{}': links to folders, dead links and devices",
        folder.string(), left_out.size(), left_out[0].path.string());
  }
  std::sort(found.begin(), found.end(), [](const CorpusFile& a, const CorpusFile& b) {
    return a.path.native() < b.path.native();
  });
  files.insert(files.end(), found.begin(), found.end());
}

// What a glob matches, by name; nothing for a path without wildcards.
std::vector<std::string> matches_of(const std::string& pattern) {
  if (pattern.find_first_of("*?[") == std::string::npos) return {};
  glob_t found = {};
  std::vector<std::string> paths;
  if (::glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  ::globfree(&found);
  std::sort(paths.begin(), paths.end());
  return paths;
}

void add_path(const fs::path& path, std::vector<CorpusFile>& files) {
  if (!fs::exists(path))
    fail_user("'{}' does not exist{}", path.string(),
              fs::is_symlink(path) ? ": it is a link to nothing" : "");
  if (fs::is_directory(path)) {
    add_folder(path, files);
  } else if (fs::is_regular_file(path)) {
    files.push_back({path, fs::file_size(path)});
  } else {
    fail_user("'{}' is neither a file nor a folder", path.string());
  }
}

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    if (comma > at) parts.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}

}  // namespace

std::vector<std::string> split_paths(const std::string& paths) {
  std::error_code error;
  return fs::exists(paths, error) ? std::vector{paths} : split_at_commas(paths);
}

std::vector<std::string> expand_paths(const std::string& paths) {
  std::vector<std::string> expanded;
  for (const auto& part : split_paths(paths)) {
    std::error_code error;
    const auto matches = fs::exists(part, error) ? std::vector<std::string>() : matches_of(part);
    expanded.insert(expanded.end(), matches.begin(), matches.end());
    if (matches.empty()) expanded.push_back(part);
  }
  return expanded;
}

bool stands_for_something(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error) || !matches_of(path).empty();
}

std::vector<CorpusFile> list_files(const std::string& paths) {
  std::vector<CorpusFile> files;
  try {
    for (const auto& part : expand_paths(paths)) add_path(part, files);
  } catch (const fs::filesystem_error& error) {
    fail_list(error.path1(), error.code());
  }
  if (files.empty()) fail_user("there are no files in '{}'; give a folder with text files", paths);
  return files;
}

uint64_t total_bytes(const std::vector<CorpusFile>& files) {
  return std::accumulate(files.begin(), files.end(), uint64_t{0},
                         [](uint64_t sum, const CorpusFile& file) { return sum + file.bytes; });
}

}  // namespace longhaul::data
