#include "longhaul/data/row_counts.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <sstream>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"

namespace longhaul::data {
namespace {

constexpr const char* kChunk = "chunk";
constexpr const char* kEnd = "end";

}  // namespace

RowCounts::RowCounts(size_t num_groups, const std::optional<RowCountsFile>& file,
                     const std::string& fingerprint)
    : groups_(num_groups) {
  if (!file) return;
  if (fs::exists(file->path)) read(file->path, fingerprint);
  if (!file->write) return;
  path_ = file->path;
  // Anew, so that what was cut or made for other data is gone.
  std::string text = fingerprint + "\n";
  for (size_t group = 0; group < groups_.size(); ++group) {
    const auto& [chunks, rows] = groups_[group];
    for (size_t chunk = 0; chunk < chunks.size(); ++chunk) {
      text += fmt::format("{} {} {} {}\n", kChunk, group, chunk, chunks[chunk]);
    }
    if (rows) text += fmt::format("{} {} {}\n", kEnd, group, chunks.size());
  }
  write_atomic(*path_, text);
  file_ = open_file(*path_, O_WRONLY | O_APPEND, "write");
}

void RowCounts::read(const fs::path& path, const std::string& fingerprint) {
  std::istringstream text(read_file(path));
  std::string line;
  std::getline(text, line);
  if (line != fingerprint) {
    log::warn(
        "'{}' is of other data or of another packing; rows are counted anew, which may take a "
        "while",
        path.string());
    return;
  }
  // Without its '\n' a line may be cut.
  while (std::getline(text, line) && !text.eof()) {
    if (!take(line)) return;
  }
}

bool RowCounts::take(const std::string& line) {
  std::istringstream words(line);
  std::string kind;
  size_t group = 0, number = 0;
  uint64_t rows = 0;
  if (!(words >> kind >> group >> number) || group >= groups_.size()) return false;
  auto& chunks = groups_[group].chunks;
  if (kind == kChunk) {
    if (!(words >> rows) || number != chunks.size()) return false;
    chunks.push_back(rows);
    return true;
  }
  if (kind != kEnd || number != chunks.size() || groups_[group].rows) return false;
  end_group(group, number);
  return true;
}

std::optional<uint64_t> RowCounts::rows_of_chunk(size_t group, size_t chunk) const {
  const auto& chunks = groups_[group].chunks;
  return chunk < chunks.size() ? std::optional(chunks[chunk]) : std::nullopt;
}

std::optional<uint64_t> RowCounts::rows_of_group(size_t group) const { return groups_[group].rows; }

std::optional<uint64_t> RowCounts::rows_of_all() const {
  if (ended_groups_ < groups_.size()) return std::nullopt;
  return rows_of_ended_;
}

void RowCounts::add_chunk(size_t group, size_t chunk, uint64_t rows) {
  auto& chunks = groups_[group].chunks;
  if (chunk < chunks.size()) {
    if (chunks[chunk] == rows) return;
    fail_user(
        "chunk {} of part {} of the data gave {} rows before and gives {} now: the files have "
        "changed under the run, and its position is not to be found; go back to the data as they "
        "were, or start anew",
        chunk, group, chunks[chunk], rows);
  }
  LONGHAUL_CHECK(chunk == chunks.size(), "chunk {} after {}", chunk, chunks.size());
  chunks.push_back(rows);
  append(fmt::format("{} {} {} {}\n", kChunk, group, chunk, rows));
}

void RowCounts::end_group(size_t group, size_t num_chunks) {
  auto& [chunks, rows] = groups_[group];
  LONGHAUL_CHECK(num_chunks == chunks.size(), "{} chunks of {}", num_chunks, chunks.size());
  if (rows) return;
  rows = 0;
  for (const uint64_t of_chunk : chunks) *rows += of_chunk;
  ++ended_groups_;
  rows_of_ended_ += *rows;
  append(fmt::format("{} {} {}\n", kEnd, group, num_chunks));
}

// A lost line costs time only, so nothing is synced.
void RowCounts::append(const std::string& line) {
  if (!file_.valid()) return;
  const ssize_t written = ::write(file_.get(), line.data(), line.size());
  if (written != static_cast<ssize_t>(line.size())) {
    log::warn("cannot write '{}': {}; a resumed run will count rows anew", path_->string(),
              std::generic_category().message(errno));
    file_.reset();
  }
}

}  // namespace longhaul::data
