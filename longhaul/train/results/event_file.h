// TensorBoard's event file: TFRecords of Event protobufs (tensorboard/compat/proto/event.proto), as
// much of them as scalars and a text need, encoded by hand. One file a start of a run; TensorBoard
// joins the files of a folder and drops what a later start repeats. Called by results/step_writer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace longhaul::train {

using Scalars = std::vector<std::pair<std::string, double>>;  // (tag, value)

class EventFile {
 public:
  // A new file in `folder`, which is made; its name sorts after those that are there. Steps from
  // `first_step` on in older files count as undone.
  EventFile(const std::filesystem::path& folder, int64_t first_step);

  // `time` in seconds since 1970. Values are stored in fp32. FileError if the disk is full.
  void add_scalars(int64_t step, double time, const Scalars& scalars);
  // Markdown, shown under "Text".
  void add_text(int64_t step, double time, const std::string& tag, const std::string& text);

  const std::filesystem::path& path() const { return path_; }

 private:
  void append(std::string_view event);

  std::filesystem::path path_;
  std::ofstream out_;
};

// CRC-32C (Castagnoli) of the bytes; and as TFRecords store it.
uint32_t crc32c(std::string_view bytes);
uint32_t masked_crc32c(std::string_view bytes);

}  // namespace longhaul::train
