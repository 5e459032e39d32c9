// What a user calls a corpus: a folder, a file, a glob, or a comma separated list of these. Called
// by the corpora, by the tokenizer command and by `config check`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace longhaul::data {

struct CorpusFile {
  std::filesystem::path path;
  uint64_t bytes;
};

// The parts of the list. A name that exists is taken as it stands, commas and all.
std::vector<std::string> split_paths(const std::string& paths);

// The same with what each glob that matches something stands for in its place.
std::vector<std::string> expand_paths(const std::string& paths);

// Whether the path exists, or is a glob (*, ?, [...]) that something matches.
bool stands_for_something(const std::string& path);

// The files in the order in which they are read: parts of the list as given, within a folder
// (searched to any depth, hidden files and folders skipped) and of a glob by path. UserError,
// naming the path, for a part that does not exist or cannot be listed, and when there is no file at
// all.
std::vector<CorpusFile> list_files(const std::string& paths);

uint64_t total_bytes(const std::vector<CorpusFile>& files);

}  // namespace longhaul::data
