#include "longhaul/checkpoint/checkpoint_reader.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "longhaul/base/hash.h"
#include "longhaul/base/parallel.h"
#include "longhaul/base/text.h"
#include "longhaul/dtensor/exchange.h"

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

using NamedEntry = std::pair<const std::string, TensorEntry>;

// File to what the manifest says of its tensors.
std::map<std::string, std::vector<const NamedEntry*>> tensors_by_file(const Manifest& manifest) {
  std::map<std::string, std::vector<const NamedEntry*>> by_file;
  for (const auto& named : manifest.tensors) by_file[named.second.extent.file].push_back(&named);
  return by_file;
}

// Opens one file and compares its header with what the manifest says.
safetensors::Reader open_file(const fs::path& path, const FileEntry& file,
                              const std::vector<const NamedEntry*>& tensors) {
  const std::string problem = size_problem(path, file.bytes);
  if (!problem.empty()) throw UserError(problem);
  safetensors::Reader reader(path);
  for (const auto* tensor : tensors) check_header(reader, tensor->first, tensor->second);
  // Else a byte could be covered by no checksum.
  if (tensors.size() != reader.header().tensors.size() ||
      file.header_bytes < reader.header().data_start) {
    fail_user("'{}' holds what the manifest does not name; {}", path.string(), kRemedy);
  }
  return reader;
}

// Opens the files that are in order; the others become problems.
OpenFiles open_files(const fs::path& folder, const Manifest& manifest, Problems& problems) {
  OpenFiles files;
  auto tensors = tensors_by_file(manifest);
  for (const auto& [name, entry] : manifest.files) {
    try {
      files.emplace(name, open_file(folder / name, entry, tensors[name]));
    } catch (const UserError& error) {
      problems.emplace_back(error.what());
    }
  }
  return files;
}

// Bytes begin .. end - 1 of a file, and what they should be.
struct Checksummed {
  std::string file;
  std::string tensor;  // empty: the file's own checksum
  int64_t begin = 0, end = 0;
  std::string expected;
  std::byte* to = nullptr;  // where they are kept, if anywhere
  bool matches = false;
};

std::vector<Checksummed> list_checksums(const Manifest& manifest, const OpenFiles& files) {
  std::vector<Checksummed> list;
  for (const auto& [name, reader] : files) {
    const FileEntry& entry = manifest.files.at(name);
    list.push_back({name, "", 0, entry.header_bytes, entry.checksum});
  }
  for (const auto& [name, entry] : manifest.tensors) {
    const auto& [file, begin, end] = entry.extent;
    if (files.contains(file)) list.push_back({file, name, begin, end, entry.checksum});
  }
  // As they lie on the disk.
  std::sort(list.begin(), list.end(), [](const Checksummed& a, const Checksummed& b) {
    return std::tie(a.file, a.begin, a.tensor) < std::tie(b.file, b.begin, b.tensor);
  });
  return list;
}

// A run of the list with an equal part of the bytes.
std::vector<Checksummed> share_of(const std::vector<Checksummed>& list, const Share& share) {
  int64_t total = 0, before = 0;
  for (const auto& item : list) total += item.end - item.begin;
  std::vector<Checksummed> own;
  for (const auto& item : list) {
    const double place =
        static_cast<double>(before) / static_cast<double>(std::max<int64_t>(total, 1));
    const int reader = std::min(static_cast<int>(place * share.ranks), share.ranks - 1);
    if (reader == share.rank) own.push_back(item);
    before += item.end - item.begin;
  }
  return own;
}

// Each piece is hashed while it is in the cache.
void compare(Checksummed& item, const fs::path& folder, const std::function<void()>& progress) {
  const FileReader file(folder / item.file);
  std::vector<std::byte> buffer(item.to == nullptr ? kHashPiece : 0);
  Hasher hash;
  for (int64_t place = item.begin; place < item.end;) {
    const auto bytes = std::min(narrow<int64_t>(kHashPiece), item.end - place);
    std::byte* to = item.to == nullptr ? buffer.data() : item.to + (place - item.begin);
    file.read(place, {to, static_cast<size_t>(bytes)});
    hash.update(to, static_cast<size_t>(bytes));
    place += bytes;
    if (progress) progress();
  }
  item.matches = hash.hex() == item.expected;
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

Problems find_mismatches(const fs::path& folder, std::vector<Checksummed> list,
                         const std::function<void()>& progress = {}) {
  parallel_tasks(list.size(), [&](size_t i) { compare(list[i], folder, progress); });
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
  return read_tensor(file, file.info(name));
}

at::Tensor CheckpointReader::load_rows(const std::string& name, int64_t first,
                                       int64_t count) const {
  const auto& file = files_.at(entry(name).extent.file);
  return read_rows(file, file.info(name), first, count);
}

void CheckpointReader::verify(const Share& share, const std::function<void()>& progress) const {
  throw_if_any(
      find_mismatches(path_, share_of(list_checksums(manifest_, files_), share), progress));
}

TensorMap CheckpointReader::load_verified() const {
  TensorMap tensors;
  auto list = list_checksums(manifest_, files_);
  for (auto& item : list) {
    if (item.tensor.empty()) continue;
    at::Tensor& tensor = tensors[item.tensor] = empty_tensor(info(item.tensor));
    item.to = bytes_of(tensor).data();
  }
  throw_if_any(find_mismatches(path_, std::move(list)));
  return tensors;
}

void verify_together(const fs::path& step_folder, const dtensor::Communicator* ranks) {
  dtensor::together(ranks, [&] {
    const Share share =
        ranks == nullptr ? Share() : Share{.rank = ranks->rank(), .ranks = ranks->size()};
    CheckpointReader(step_folder).verify(share);
    return std::string();
  });
}

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
  const Problems mismatches = find_mismatches(step_folder, list_checksums(manifest, files));
  problems.insert(problems.end(), mismatches.begin(), mismatches.end());
  return problems;
}

}  // namespace longhaul::checkpoint
