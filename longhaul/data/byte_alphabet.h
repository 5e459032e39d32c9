// The alphabet in which byte-level tokenizers spell their tokens: each of the 256 bytes is one
// printable character (GPT-2's table: printable Latin-1 bytes are themselves, the other 68 follow
// from U+0100 on). Only tokenizer.json files know it; inside the program tokens are plain bytes.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace longhaul::data {

std::string to_byte_alphabet(std::string_view bytes);

// The bytes that `spelled` (valid UTF-8) stands for; nullopt if a character is outside the
// alphabet.
std::optional<std::string> from_byte_alphabet(std::string_view spelled);

// The 256 bytes in the order of their characters: the order in which new vocabularies list them.
std::array<uint8_t, 256> bytes_in_alphabet_order();

}  // namespace longhaul::data
