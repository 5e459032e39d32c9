#include "longhaul/train/results/event_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>

#include "longhaul/base/clock.h"
#include "longhaul/base/file.h"

namespace longhaul::train {
namespace {

std::string little_endian(uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(value >> 8 * i);
  return text;
}

// A protobuf message under construction: a tag (field number and wire type) before each value.
class Message {
 public:
  Message& varint(int field, uint64_t value) {
    raw(static_cast<uint64_t>(field) << 3);
    raw(value);
    return *this;
  }
  Message& fixed64(int field, double value) {
    raw(static_cast<uint64_t>(field) << 3 | 1);
    text_ += little_endian(std::bit_cast<uint64_t>(value), 8);
    return *this;
  }
  Message& fixed32(int field, float value) {
    raw(static_cast<uint64_t>(field) << 3 | 5);
    text_ += little_endian(std::bit_cast<uint32_t>(value), 4);
    return *this;
  }
  // A string, or a message within this one.
  Message& bytes(int field, std::string_view value) {
    raw(static_cast<uint64_t>(field) << 3 | 2);
    raw(value.size());
    text_ += value;
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  void raw(uint64_t value) {
    for (; value >= 0x80; value >>= 7) text_ += static_cast<char>(value | 0x80);
    text_ += static_cast<char>(value);
  }

  std::string text_;
};

// The field numbers of event.proto, summary.proto and tensor.proto.
namespace event {
constexpr int kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
}
namespace summary {
constexpr int kValue = 1;
namespace value {
constexpr int kTag = 1, kSimpleValue = 2, kTensor = 8, kMetadata = 9;
}
namespace metadata {
constexpr int kPluginData = 1, kDataClass = 4, kDataClassTensor = 2;
constexpr int kPluginName = 1;  // of the plugin data
}  // namespace metadata
}  // namespace summary
namespace tensor {
constexpr int kDtype = 1, kShape = 2, kStringValue = 8, kDtypeString = 7;
constexpr int kDim = 2, kSize = 1;  // of the shape, and of its dims
}  // namespace tensor
namespace session {
constexpr int kStatus = 1, kStart = 1;
}

Message new_event(int64_t step, double time) {
  Message message;
  message.fixed64(event::kWallTime, time).varint(event::kStep, static_cast<uint64_t>(step));
  return message;
}

std::string scalar_value(const std::string& tag, double value) {
  return Message()
      .bytes(summary::value::kTag, tag)
      .fixed32(summary::value::kSimpleValue, static_cast<float>(value))
      .text();
}

std::string text_value(const std::string& tag, const std::string& text) {
  const std::string shape =
      Message().bytes(tensor::kDim, Message().varint(tensor::kSize, 1).text()).text();
  const std::string content = Message()
                                  .varint(tensor::kDtype, tensor::kDtypeString)
                                  .bytes(tensor::kShape, shape)
                                  .bytes(tensor::kStringValue, text)
                                  .text();
  const std::string plugin = Message().bytes(summary::metadata::kPluginName, "text").text();
  const std::string metadata =
      Message()
          .bytes(summary::metadata::kPluginData, plugin)
          .varint(summary::metadata::kDataClass, summary::metadata::kDataClassTensor)
          .text();
  return Message()
      .bytes(summary::value::kTag, tag)
      .bytes(summary::value::kTensor, content)
      .bytes(summary::value::kMetadata, metadata)
      .text();
}

constexpr std::array<uint32_t, 256> crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}

constexpr std::string_view kPrefix = "events.out.tfevents.";

// The second in the name of an event file, whoever wrote it; 0 for other files.
int64_t second_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return 0;
  int64_t second = 0;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), second);
  return second;
}

// TensorBoard reads a folder's files in the order of their names, so a clock that was set back must
// not put this one before older ones.
std::filesystem::path next_path(const std::filesystem::path& folder) {
  auto second = static_cast<int64_t>(seconds_since_1970());
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    second = std::max(second, second_of(entry.path().filename().string()) + 1);
  }
  return folder / fmt::format("{}{:010}.longhaul", kPrefix, second);
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = crc_table();
  uint32_t crc = 0xffffffffu;
  for (const char byte : bytes) crc = crc >> 8 ^ kTable[(crc ^ static_cast<uint8_t>(byte)) & 0xff];
  return ~crc;
}

uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8u;
}

EventFile::EventFile(const std::filesystem::path& folder, int64_t first_step) {
  create_folders(folder);
  path_ = next_path(folder);
  out_.open(path_, std::ios::binary);
  if (!out_) fail_file("open", path_, errno);
  append(Message()
             .fixed64(event::kWallTime, seconds_since_1970())
             .bytes(event::kFileVersion, "brain.Event:2")
             .text());
  const std::string start = Message().varint(session::kStatus, session::kStart).text();
  append(new_event(first_step, seconds_since_1970()).bytes(event::kSessionLog, start).text());
}

void EventFile::add_scalars(int64_t step, double time, const Scalars& scalars) {
  Message values;
  for (const auto& [tag, value] : scalars) {
    values.bytes(summary::kValue, scalar_value(tag, value));
  }
  append(new_event(step, time).bytes(event::kSummary, values.text()).text());
}

void EventFile::add_text(int64_t step, double time, const std::string& tag,
                         const std::string& text) {
  Message values;
  values.bytes(summary::kValue, text_value(tag, text));
  append(new_event(step, time).bytes(event::kSummary, values.text()).text());
}

// TFRecord: the length, its checksum, the event, its checksum.
void EventFile::append(std::string_view event) {
  const std::string length = little_endian(event.size(), 8);
  out_ << length << little_endian(masked_crc32c(length), 4) << event
       << little_endian(masked_crc32c(event), 4) << std::flush;
  if (!out_) fail_file("write", path_, errno);
}

}  // namespace longhaul::train
