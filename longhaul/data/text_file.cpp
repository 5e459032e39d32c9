#include "longhaul/data/text_file.h"

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/utf8.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

bool is_sound(std::string_view text) {
  return is_valid_utf8(text) && text.find('\0') == std::string_view::npos;
}

std::string describe_byte(unsigned char byte) {
  return byte == 0 ? std::string("a NUL byte, which no text holds")
                   : fmt::format("0x{:02X} is not UTF-8 here", byte);
}

size_t first_invalid(std::string_view text) {
  return std::min(first_invalid_utf8(text), text.find('\0'));
}

[[noreturn]] void fail_invalid(const std::filesystem::path& path, std::string_view text,
                               const TextPlace& before) {
  const size_t at = first_invalid(text);
  fail_user(
      "{}:{}: {} (byte {} of the file); convert the file to UTF-8, take it out of the data, or "
      "have it replaced by U+FFFD: training.invalid_text = \"replace\", or --invalid-text replace "
      "of `longhaul data` and `longhaul tokenizer train`",
      path.string(), 1 + before.lines + lines_before_invalid(text),
      describe_byte(static_cast<unsigned char>(text[at])), before.bytes + at);
}

}  // namespace

std::string what_is_invalid(std::string_view text) {
  if (is_sound(text)) return "";
  const size_t at = first_invalid(text);
  return fmt::format("{} (byte {} of the text)",
                     describe_byte(static_cast<unsigned char>(text[at])), at);
}

std::string replace_invalid(std::string_view text) {
  const std::string repaired = repair_utf8(text);
  std::string out;
  for (const char c : repaired) {
    if (c == '\0') {
      append_utf8(out, U'\uFFFD');
    } else {
      out.push_back(c);
    }
  }
  return out;
}

uint64_t lines_before_invalid(std::string_view text) {
  const auto end = text.begin() + static_cast<ptrdiff_t>(first_invalid(text));
  return static_cast<uint64_t>(std::count(text.begin(), end, '\n'));
}

TextFile check_text(std::string text, const std::filesystem::path& path, InvalidText on_invalid,
                    const TextPlace& before) {
  if (is_sound(text)) return {std::move(text), false};
  if (on_invalid == InvalidText::kStop) fail_invalid(path, text, before);
  return {replace_invalid(text), true};
}

TextFile read_text_file(const std::filesystem::path& path, InvalidText on_invalid) {
  return check_text(read_file(path), path, on_invalid);
}

}  // namespace longhaul::data
