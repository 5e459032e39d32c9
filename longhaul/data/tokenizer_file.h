// Reads tokenizer.json into the parts that Tokenizer works with, and checks it on the way. Internal
// to the tokenizer.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "longhaul/data/added_tokens.h"
#include "longhaul/data/bpe.h"
#include "longhaul/data/decoder.h"
#include "longhaul/data/normalizer.h"
#include "longhaul/data/pre_tokenizer.h"
#include "longhaul/data/string_ids.h"
#include "longhaul/data/symbol_table.h"

namespace longhaul::data {

struct TokenizerParts {
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Decoder decoder;
  AddedTokenFinder early_tokens = {}, late_tokens = {};  // late: those with `normalized`
  SymbolTable symbols = {};
  BpeModel model = {};
  StringIds id_of_spelling = {};
  // What the decoder gets for each id; with a byte-level decoder the bytes, else the spelling.
  std::vector<std::string> decoded_of_id = {};
  std::vector<bool> is_token = {}, is_special = {}, is_byte = {};  // is_byte: "<0xE4>"
  std::optional<int32_t> eos = {}, bos = {};
  uint64_t fingerprint = 0;
};

// UserError, with `name` in front, for anything that is broken or not supported.
TokenizerParts parse_tokenizer(std::string_view json, const std::string& name);

// Takes the eos and bos tokens from the text of a tokenizer_config.json.
void apply_tokenizer_config(TokenizerParts& parts, std::string_view json, const std::string& name);

}  // namespace longhaul::data
