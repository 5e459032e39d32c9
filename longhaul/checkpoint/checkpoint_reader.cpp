#include "longhaul/checkpoint/checkpoint_reader.h"

#include <set>

#include "longhaul/base/hash.h"
#include "longhaul/base/parallel.h"
#include "longhaul/base/text.h"
#include "longhaul/checkpoint/tensor_file.h"

namespace longhaul::checkpoint {
namespace {

constexpr const char* kRemedy = "restore the file or use another checkpoint";

using Problems = std::vector<std::string>;

// Empty if the file is there with the right size.
std::string size_problem(const fs::path& path, int64_t expected) {
  std::error_code error;
  const auto bytes = fs::file_size(path, error);
  if (error) {
    return fmt::format("'{}' is missing or unreadable ({}); {}", path.string(), error.message(),
                       kRemedy);
  }
  const auto wanted = static_cast<uintmax_t>(expected);
  if (bytes == wanted) return "";
  return fmt::format("'{}' is {}: it has {} bytes instead of {}; {}", path.string(),
                     bytes < wanted ? "truncated" : "damaged", bytes, wanted, kRemedy);
}

void check_header(const safetensors::Reader& file, const std::string& name,
                  const TensorEntry& entry) {
  const auto& info = file.info(name);
  const int64_t start = file.header().data_start;
  if (info.dtype == entry.dtype && info.shape == entry.shape &&
      start + info.begin == entry.extent.begin && start + info.end == entry.extent.end) {
    return;
  }
  fail_user("'{}': tensor '{}' is {} {} at byte {}, but {} {} at byte {} in the manifest; {}",
            file.path().string(), name, safetensors::dtype_name(info.dtype),
            safetensors::shape_text(info.shape), start + info.begin,
            safetensors::dtype_name(entry.dtype), safetensors::shape_text(entry.shape),
            entry.extent.begin, kRemedy);
}

// Opens one file and compares its header with the manifest.
safetensors::Reader open_file(const fs::path& path, const Manifest& manifest) {
  const std::string problem = size_problem(path, manifest.files.at(path.filename()).bytes);
  if (!problem.empty()) throw UserError(problem);
  safetensors::Reader reader(path);
  for (const auto& [name, entry] : manifest.tensors) {
    if (entry.extent.file == path.filename()) check_header(reader, name, entry);
  }
  return reader;
}

// Opens the files that are in order; the others become problems.
OpenFiles open_files(const fs::path& folder, const Manifest& manifest, Problems& problems) {
  OpenFiles files;
  for (const auto& [name, entry] : manifest.files) {
    try {
      files.emplace(name, open_file(folder / name, manifest));
    } catch (const UserError& error) {
      problems.emplace_back(error.what());
    }
  }
  return files;
}

struct Checksummed {
  std::string file;
  std::string tensor;  // empty: the whole file
  std::span<const std::byte> bytes;
  std::string expected;
  bool matches = false;
};

std::vector<Checksummed> list_checksums(const Manifest& manifest, const OpenFiles& files) {
  std::vector<Checksummed> list;
  for (const auto& [name, reader] : files) {
    list.push_back({name, "", reader.file(), manifest.files.at(name).checksum});
  }
  for (const auto& [name, entry] : manifest.tensors) {
    const auto file = files.find(entry.extent.file);
    if (file == files.end()) continue;
    const auto bytes = file->second.bytes(file->second.info(name));
    list.push_back({file->first, name, bytes, entry.checksum});
  }
  return list;
}

// A file's own checksum is reported only if no tensor in it explains the damage.
Problems describe_mismatches(const fs::path& folder, const std::vector<Checksummed>& list) {
  Problems problems;
  std::set<std::string> explained;
  for (const auto& item : list) {
    if (item.matches || item.tensor.empty()) continue;
    explained.insert(item.file);
    problems.push_back(fmt::format("'{}': tensor '{}' does not match its checksum; {}",
                                   (folder / item.file).string(), item.tensor, kRemedy));
  }
  for (const auto& item : list) {
    if (item.matches || explained.contains(item.file)) continue;
    problems.push_back(fmt::format("'{}' does not match its checksum, in its header; {}",
                                   (folder / item.file).string(), kRemedy));
  }
  return problems;
}

Problems find_mismatches(const fs::path& folder, const Manifest& manifest, const OpenFiles& files) {
  std::vector<Checksummed> list = list_checksums(manifest, files);
  parallel_tasks(list.size(), [&](size_t i) {
    list[i].matches = hash_hex(list[i].bytes.data(), list[i].bytes.size()) == list[i].expected;
  });
  return describe_mismatches(folder, list);
}

void throw_if_any(const Problems& problems) {
  if (problems.empty()) return;
  const std::string more =
      problems.size() == 1 ? "" : fmt::format(" (and {} more)", problems.size() - 1);
  throw UserError(problems.front() + more);
}

}  // namespace

CheckpointReader::CheckpointReader(const fs::path& step_folder)
    : path_(step_folder), manifest_(read_manifest(step_folder)) {
  Problems problems;
  files_ = open_files(path_, manifest_, problems);
  throw_if_any(problems);
}

const TensorEntry& CheckpointReader::entry(const std::string& name) const {
  const auto found = manifest_.tensors.find(name);
  if (found == manifest_.tensors.end()) {
    fail_user("{}: there is no tensor '{}'{}", path_.string(), name, did_you_mean(name, names()));
  }
  return found->second;
}

std::vector<std::string> CheckpointReader::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : manifest_.tensors) names.push_back(name);
  return names;
}

const safetensors::TensorInfo& CheckpointReader::info(const std::string& name) const {
  return files_.at(entry(name).extent.file).info(name);
}

at::Tensor CheckpointReader::load(const std::string& name) const {
  const auto& file = files_.at(entry(name).extent.file);
  const auto& info = file.info(name);
  return to_tensor(info, file.bytes(info));
}

void CheckpointReader::verify() const { throw_if_any(find_mismatches(path_, manifest_, files_)); }

Problems find_missing(const fs::path& step_folder, const Manifest& manifest) {
  Problems problems;
  for (const auto& [name, entry] : manifest.files) {
    std::string problem = size_problem(step_folder / name, entry.bytes);
    if (!problem.empty()) problems.push_back(std::move(problem));
  }
  return problems;
}

Problems find_damage(const fs::path& step_folder) {
  Manifest manifest;
  try {
    manifest = read_manifest(step_folder);
  } catch (const UserError& error) {
    return {error.what()};
  }
  Problems problems;
  const OpenFiles files = open_files(step_folder, manifest, problems);
  const Problems mismatches = find_mismatches(step_folder, manifest, files);
  problems.insert(problems.end(), mismatches.begin(), mismatches.end());
  return problems;
}

}  // namespace longhaul::checkpoint
