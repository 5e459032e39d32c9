#include "longhaul/data/text_file.h"

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

bool is_sound(std::string_view text) {
  return is_valid_utf8(text) && text.find('\0') == std::string_view::npos;
}

[[noreturn]] void fail_invalid(const std::filesystem::path& path, std::string_view text) {
  const size_t at = std::min(first_invalid_utf8(text), text.find('\0'));
  const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(at), '\n');
  const auto byte = static_cast<unsigned char>(text[at]);
  fail_user(
      "{}:{}: {} (byte {} of the file); convert the file to UTF-8, take it out of the data, or "
      "have it replaced by U+FFFD: training.invalid_text = \"replace\", or --invalid-text replace "
      "of `longhaul tokenizer train`",
      path.string(), line,
      byte == 0 ? std::string("a NUL byte, which no text holds")
                : fmt::format("0x{:02X} is not UTF-8 here", byte),
      at);
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

}  // namespace

TextFile read_text_file(const std::filesystem::path& path, InvalidText on_invalid) {
  std::string text = read_file(path);
  if (is_sound(text)) return {std::move(text), false};
  if (on_invalid == InvalidText::kStop) fail_invalid(path, text);
  return {replace_invalid(text), true};
}

}  // namespace longhaul::data
