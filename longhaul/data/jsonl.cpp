#include "longhaul/data/jsonl.h"

#include <simdjson.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "longhaul/base/error.h"
#include "longhaul/base/utf8.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

namespace dom = simdjson::dom;

constexpr size_t kPiece = size_t{128} << 10;

const char* type_name(dom::element_type type) {
  switch (type) {
    case dom::element_type::ARRAY:
      return "an array";
    case dom::element_type::OBJECT:
      return "an object";
    case dom::element_type::BOOL:
      return "a boolean";
    case dom::element_type::NULL_VALUE:
      return "null";
    case dom::element_type::STRING:
      return "a string";
    default:
      return "a number";
  }
}

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

// Lines of a text that comes in pieces, with the place where each begins.
class Lines {
 public:
  explicit Lines(std::unique_ptr<ByteSource> source) : source_(std::move(source)) {}

  struct Line {
    std::string_view text;  // valid until the next call; without its '\n'
    uint64_t begin = 0;     // bytes of text before it
    bool too_long = false;  // and then `text` is empty
  };

  // False behind the last line. Throws BrokenData where the source does; a line that is cut by
  // damage is not handed out.
  bool next(Line& line) {
    line = {.text = {}, .begin = position_, .too_long = false};
    while (true) {
      const std::string_view rest(buffer_.data() + at_, size_ - at_);
      const size_t end = rest.find('\n', searched_);
      if (end != std::string_view::npos) return take(line, end, end + 1);
      searched_ = rest.size();
      if (rest.size() > kLongestLine) skip_piece(line);
      if (!fill()) break;
    }
    const size_t left = size_ - at_;
    return (left > 0 || line.too_long) && take(line, left, left);
  }

  uint64_t consumed() const { return source_->consumed(); }

 private:
  bool take(Line& line, size_t length, size_t with_end) {
    line.too_long = line.too_long || length > kLongestLine;
    if (!line.too_long) line.text = {buffer_.data() + at_, length};
    at_ += with_end;
    position_ += with_end;
    searched_ = 0;
    return true;
  }

  void skip_piece(Line& line) {
    line.too_long = true;
    position_ += size_ - at_;
    at_ = size_ = searched_ = 0;
  }

  bool fill() {
    if (at_ > 0) {
      std::memmove(buffer_.data(), buffer_.data() + at_, size_ - at_);
      size_ -= at_;
      at_ = 0;
    }
    if (buffer_.size() < size_ + kPiece) buffer_.resize(std::max(2 * size_, size_ + kPiece));
    const size_t got = source_->read(buffer_.data() + size_, kPiece);
    size_ += got;
    return got > 0;
  }

  std::unique_ptr<ByteSource> source_;
  std::string buffer_;
  size_t at_ = 0, size_ = 0, searched_ = 0;  // searched_: behind at_, without a line's end
  uint64_t position_ = 0;
};

// The lines that begin in a range of a file, or all of a compressed one.
class JsonlReader : public DocumentReader {
 public:
  JsonlReader(const SourceFile& file, const Unit& unit, const DocumentOptions& options,
              BadDocuments& bad)
      : file_(file),
        unit_(unit),
        bad_(bad),
        line_(options),
        // One byte earlier: whether a line begins at unit.begin is told by what stands before it.
        offset_(unit.begin == 0 ? 0 : unit.begin - 1),
        lines_(open_bytes(file.path, file.format.compression, offset_)) {}

  bool next(Document& document) override {
    try {
      if (unit_.begin > 0 && number_ == 0 && !next_line()) return false;
      while (next_line()) {
        if (take(document)) return true;
      }
    } catch (const BrokenData& error) {
      ended_ = true;
      ++number_;
      leave_out(error.what());
    }
    return false;
  }

  uint64_t consumed() const override { return std::min(lines_.consumed(), unit_.disk_bytes); }

 private:
  bool is_whole_file() const { return file_.format.compression != Compression::kNone; }

  bool next_line() {
    if (ended_ || !lines_.next(current_)) return false;
    const bool inside = is_whole_file() || offset_ + current_.begin < unit_.end;
    ended_ = !inside;
    number_ += inside;
    return inside;
  }

  bool take(Document& document) {
    std::string_view text = current_.text;
    if (offset_ + current_.begin == 0 && text.starts_with(kByteOrderMark)) {
      text.remove_prefix(kByteOrderMark.size());
    }
    if (current_.too_long) {
      leave_out(fmt::format("the line is longer than {} bytes", kLongestLine));
      return false;
    }
    if (is_blank(text)) return false;
    if (line_.read(text, document)) return true;
    leave_out(line_.why());
    return false;
  }

  void leave_out(const std::string& why) {
    bad_.add([this] { return place(); }, why, [this] { return cheap_place(); });
  }

  // With the line's number in the file, which costs reading what stands before the unit.
  std::string place() {
    if (!lines_before_) lines_before_ = count_lines_before();
    return fmt::format("{}:{}", file_.path.string(), *lines_before_ + number_);
  }

  // Behind the beginning of a large file, the byte at which the line begins.
  std::string cheap_place() {
    if (unit_.begin == 0 || lines_before_) return place();
    return fmt::format("{}, byte {}", file_.path.string(), offset_ + current_.begin);
  }

  uint64_t count_lines_before() const {
    uint64_t lines = 0, left = offset_;
    const auto source = open_bytes(file_.path, Compression::kNone);
    std::string piece(kPiece, '\0');
    while (left > 0) {
      const size_t got = source->read(piece.data(), std::min<uint64_t>(left, piece.size()));
      if (got == 0) break;
      lines += static_cast<uint64_t>(
          std::count(piece.begin(), piece.begin() + static_cast<ptrdiff_t>(got), '\n'));
      left -= got;
    }
    return lines;
  }

  const SourceFile& file_;
  const Unit& unit_;
  BadDocuments& bad_;
  JsonlLine line_;
  const uint64_t offset_;
  Lines lines_;
  Lines::Line current_;
  uint64_t number_ = 0;  // of the current line, from where the reading began
  bool ended_ = false;
  std::optional<uint64_t> lines_before_;
};

}  // namespace

JsonlLine::JsonlLine(const DocumentOptions& options)
    : options_(options), parser_(std::make_unique<dom::parser>()) {}

JsonlLine::~JsonlLine() = default;

bool JsonlLine::read(std::string_view line, Document& document) {
  why_.clear();
  document.replaced = false;
  if (is_valid_utf8(line)) return take_text(line, document);
  if (options_.on_invalid == InvalidText::kStop) {
    why_ = what_is_invalid(line);
    return false;
  }
  const bool taken = take_text(repair_utf8(line), document);
  document.replaced = true;
  return taken;
}

bool JsonlLine::take_text(std::string_view line, Document& document) {
  dom::element element;
  dom::object object;
  if (const auto error = parser_->parse(line.data(), line.size()).get(element)) {
    why_ = fmt::format("not valid JSON ({})", simdjson::error_message(error));
    return false;
  }
  if (element.get(object) != simdjson::SUCCESS) {
    why_ = fmt::format("{}, expected an object", type_name(element.type()));
    return false;
  }
  dom::element field;
  if (object.at_key(options_.text_field).get(field) != simdjson::SUCCESS) {
    why_ = fmt::format("there is no field \"{}\" (training.text_field)", options_.text_field);
    return false;
  }
  std::string_view text;
  if (field.get(text) != simdjson::SUCCESS) {
    why_ = fmt::format("the field \"{}\" is {}, expected a string", options_.text_field,
                       type_name(field.type()));
    return false;
  }
  why_ = data::take_text(text, options_.on_invalid, document);
  return why_.empty();
}

std::unique_ptr<DocumentReader> open_jsonl(const SourceFile& file, const Unit& unit,
                                           const DocumentOptions& options, BadDocuments& bad) {
  return std::make_unique<JsonlReader>(file, unit, options, bad);
}

}  // namespace longhaul::data
