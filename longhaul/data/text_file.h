// A text file of a corpus: read whole, and looked at before anything learns from it. Bytes that are
// not UTF-8 and NUL bytes mean that a file is something else than text, or in another encoding.
// Called by corpora and by the tokenizer's training.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace longhaul::data {

enum class InvalidText {
  kStop,     // UserError
  kReplace,  // each ill-formed part (base/utf8.h) and each NUL byte reads as U+FFFD
};

struct TextFile {
  std::string text;       // valid UTF-8 without NUL
  bool replaced = false;  // whether anything had to be
};

// What of a file stands before a part of it.
struct TextPlace {
  uint64_t lines = 0, bytes = 0;
};

// `text`, which stands there in the file, as it is or repaired. UserError with file, line and byte
// for text that is not valid (kStop).
TextFile check_text(std::string text, const std::filesystem::path& path, InvalidText on_invalid,
                    const TextPlace& before = {});

// The line ends before the first part of `text` that is not valid, of which there is one.
uint64_t lines_before_invalid(std::string_view text);

// What is wrong with `text`, and where; empty if it is valid UTF-8 without NUL.
std::string what_is_invalid(std::string_view text);

// `text` with each ill-formed part and each NUL byte replaced by U+FFFD.
std::string replace_invalid(std::string_view text);

// The same of what the file holds. UserError with file, line and byte for text that is not valid
// (kStop), and for an unreadable file.
TextFile read_text_file(const std::filesystem::path& path, InvalidText on_invalid);

}  // namespace longhaul::data
