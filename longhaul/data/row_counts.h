// How many rows each chunk of a stream gives, as far as the stream has been read: with that a
// position is found again without tokenising what is before it. What is not known has to be read
// anew, so that it costs time and never exactness. Called by chunk_walk.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "longhaul/base/file.h"

namespace longhaul::data {

struct RowCountsFile {
  std::filesystem::path path;
  bool write = false;  // else it is only read
};

class RowCounts {
 public:
  // Takes what the file holds, if there is one and it was made for the same `fingerprint`, a text
  // without line ends. A line that is cut, as by a kill, counts as not there.
  RowCounts(size_t num_groups, const std::optional<RowCountsFile>& file,
            const std::string& fingerprint);

  std::optional<uint64_t> rows_of_chunk(size_t group, size_t chunk) const;
  // Known when all its chunks were read.
  std::optional<uint64_t> rows_of_group(size_t group) const;
  std::optional<uint64_t> rows_of_all() const;

  // UserError if they were others before: the data have changed under the run.
  void add_chunk(size_t group, size_t chunk, uint64_t rows);
  void end_group(size_t group, size_t num_chunks);

 private:
  struct Group {
    std::vector<uint64_t> chunks;
    std::optional<uint64_t> rows;  // all chunks are there
  };

  void read(const std::filesystem::path& path, const std::string& fingerprint);
  bool take(const std::string& line);
  void append(const std::string& line);

  std::vector<Group> groups_;
  size_t ended_groups_ = 0;
  uint64_t rows_of_ended_ = 0;
  std::optional<std::filesystem::path> path_;  // to write to
  FileDescriptor file_;
};

}  // namespace longhaul::data
