#include "longhaul/data/symbol_table.h"

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/data/byte_alphabet.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {

SymbolTable::SymbolTable(SymbolRules rules, StringIds ids)
    : rules_(std::move(rules)), ids_(std::move(ids)) {
  for (size_t byte = 0; byte < 256; ++byte) {
    const std::string one(1, static_cast<char>(byte));
    byte_ids_[byte] = id_of(to_byte_alphabet(one)).value_or(-1);
    fallback_ids_[byte] = id_of(fmt::format("<0x{:02X}>", byte)).value_or(-1);
  }
  all_bytes_known_ = rules_.continuing_subword_prefix.empty() &&
                     rules_.end_of_word_suffix.empty() &&
                     std::find(byte_ids_.begin(), byte_ids_.end(), -1) == byte_ids_.end();
  if (!rules_.byte_level || !rules_.ignore_merges) return;
  for (const auto& [spelling, id] : ids_) {
    if (const auto bytes = from_byte_alphabet(spelling)) ids_of_bytes_.emplace(*bytes, id);
  }
}

std::optional<int32_t> SymbolTable::id_of(std::string_view spelling) const {
  const auto found = ids_.find(spelling);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<int32_t> SymbolTable::whole(std::string_view piece) const {
  if (!rules_.ignore_merges) return std::nullopt;
  if (!rules_.byte_level) return id_of(piece);
  const auto found = ids_of_bytes_.find(piece);
  return found == ids_of_bytes_.end() ? std::nullopt : std::optional(found->second);
}

void SymbolTable::read(std::string_view piece, std::vector<int32_t>& ids) const {
  if (rules_.byte_level && all_bytes_known_) {
    ids.resize(piece.size());
    for (size_t i = 0; i < piece.size(); ++i) ids[i] = byte_ids_[static_cast<uint8_t>(piece[i])];
    return;
  }
  ids.clear();
  rules_.byte_level ? read_characters(to_byte_alphabet(piece), ids) : read_characters(piece, ids);
}

void SymbolTable::read_characters(std::string_view text, std::vector<int32_t>& ids) const {
  int32_t unknown = -1;  // read, but not in `ids` yet
  for (size_t at = 0; at < text.size();) {
    const size_t length = code_point_at(text, at).length;
    std::string character(text.substr(at, length));
    if (at > 0) character.insert(0, rules_.continuing_subword_prefix);
    at += length;
    if (at == text.size()) character += rules_.end_of_word_suffix;
    if (const auto id = id_of(character)) {
      if (unknown >= 0) ids.push_back(unknown);
      unknown = -1;
      ids.push_back(*id);
      // Bytes do not end a row of unknown characters, which then comes behind them: a peculiarity
      // of the package, kept so that ids are the same.
    } else if (!add_bytes(character, ids) && !rules_.unk_token.empty()) {
      if (unknown >= 0 && !rules_.fuse_unk) ids.push_back(unknown);
      unknown = unk_id(character);
    }
  }
  if (unknown >= 0) ids.push_back(unknown);
}

bool SymbolTable::add_bytes(std::string_view character, std::vector<int32_t>& ids) const {
  if (!rules_.byte_fallback) return false;
  const auto id = [&](char byte) { return fallback_ids_[static_cast<uint8_t>(byte)]; };
  for (const char byte : character) {
    if (id(byte) < 0) return false;
  }
  for (const char byte : character) ids.push_back(id(byte));
  return true;
}

int32_t SymbolTable::unk_id(std::string_view character) const {
  const auto id = id_of(rules_.unk_token);
  if (!id) {
    fail_user(
        "the tokenizer has no token for '{}', and its unk_token '{}' is not in its vocabulary",
        character, rules_.unk_token);
  }
  return *id;
}

}  // namespace longhaul::data
