// Reads tokenizer.json into the parts that Tokenizer works with, and checks it on the way. Internal
// to the tokenizer.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "longhaul/data/added_tokens.h"
#include "longhaul/data/bpe.h"
#include "longhaul/data/pre_tokenizer.h"

namespace longhaul::data {

struct TokenizerParts {
  PreTokenizer pre_tokenizer;
  AddedTokenFinder early_tokens = {}, late_tokens = {};  // late: those with `normalized`
  BpeModel model = {};
  bool ignore_merges = false;  // a piece that is a token is that token, whatever the merges
  std::unordered_map<std::string, int32_t> id_of_spelling = {};
  std::unordered_map<std::string, int32_t> id_of_bytes = {};  // filled with ignore_merges only
  std::vector<std::string> bytes_of_id = {};
  std::vector<bool> is_token = {}, is_special = {};
  std::optional<int32_t> eos = {}, bos = {};
  uint64_t fingerprint = 0;
};

// UserError, with `name` in front, for anything that is broken or not supported.
TokenizerParts parse_tokenizer(std::string_view json, const std::string& name);

// Takes the eos and bos tokens from the text of a tokenizer_config.json.
void apply_tokenizer_config(TokenizerParts& parts, std::string_view json, const std::string& name);

}  // namespace longhaul::data
