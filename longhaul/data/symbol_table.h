// The symbols that byte pair encoding starts from: the characters (or bytes) of a piece as ids of
// the vocabulary, with the rules of a tokenizer.json's model for those that it does not hold. It
// knows no merges. Called by Tokenizer.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "longhaul/data/string_ids.h"

namespace longhaul::data {

struct SymbolRules {
  bool byte_level = false;     // pieces are bytes, the vocabulary spells them in the byte alphabet
  bool byte_fallback = false;  // an unknown character is its bytes "<0xE4>", if all are known
  std::string unk_token = {};  // else it is this token; empty: it vanishes
  bool fuse_unk = false;       // several in a row are one
  std::string continuing_subword_prefix = {};  // before all characters of a piece but the first
  std::string end_of_word_suffix = {};         // behind the last character of a piece
  bool ignore_merges = false;  // a piece that is a token is that token, whatever the merges
};

class SymbolTable {
 public:
  SymbolTable() = default;
  // ids: the model's vocabulary by spelling.
  SymbolTable(SymbolRules rules, StringIds ids);

  // Replaces `ids` by the symbols of `piece`; UserError if it needs an unk_token that is not there.
  void read(std::string_view piece, std::vector<int32_t>& ids) const;

  // With ignore_merges: the token that is the whole piece.
  std::optional<int32_t> whole(std::string_view piece) const;

 private:
  void read_characters(std::string_view text, std::vector<int32_t>& ids) const;
  std::optional<int32_t> id_of(std::string_view spelling) const;
  bool add_bytes(std::string_view character, std::vector<int32_t>& ids) const;
  int32_t unk_id(std::string_view character) const;

  SymbolRules rules_;
  StringIds ids_;
  StringIds ids_of_bytes_;  // byte_level with ignore_merges: by the bytes of a token
  std::array<int32_t, 256> byte_ids_{}, fallback_ids_{};  // -1: none
  bool all_bytes_known_ = false;                          // and nothing before or behind them
};

}  // namespace longhaul::data
