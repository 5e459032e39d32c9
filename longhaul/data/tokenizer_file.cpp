#include "longhaul/data/tokenizer_file.h"

#include <initializer_list>
#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/base/json.h"
#include "longhaul/base/rng.h"
#include "longhaul/data/byte_alphabet.h"
#include "longhaul/data/component.h"
#include "longhaul/data/model_reader.h"
#include "longhaul/data/post_processor.h"

namespace longhaul::data {
namespace {

using nlohmann::json;

void add_token(TokenizerParts& parts, const std::string& spelling, int32_t id) {
  const auto index = static_cast<size_t>(id);
  if (parts.is_token.size() <= index) {
    parts.is_token.resize(index + 1);
    parts.is_special.resize(index + 1);
    parts.is_byte.resize(index + 1);
    parts.decoded_of_id.resize(index + 1);
  }
  if (parts.is_token[index]) fail_user("two tokens have the id {}, one is '{}'", id, spelling);
  parts.is_token[index] = true;
  parts.id_of_spelling.emplace(spelling, id);
  parts.decoded_of_id[index] = spelling;
}

AddedToken read_added_token(const json& entry) {
  if (!entry.is_object()) fail_user("added_tokens: {} is not an object", entry.dump());
  AddedToken token;
  token.content = text_of(entry, "content");
  if (token.content.empty()) fail_user("added_tokens: a token is empty");
  token.special = flag(entry, "special");
  token.normalized = flag(entry, "normalized");
  token.lstrip = flag(entry, "lstrip");
  token.rstrip = flag(entry, "rstrip");
  token.single_word = flag(entry, "single_word");
  return token;
}

// What a token with `normalized` reads in normalized text, and what the decoder gets for it.
void normalize(AddedToken& token, TextNormalizer& normalizer) {
  const std::string content = token.content;
  token.content = normalizer.apply(content).text;
  if (token.content.empty()) {
    fail_user("added_tokens: nothing is left of '{}' once it is normalized", content);
  }
}

void read_added_tokens(const json& entries, TokenizerParts& parts) {
  if (!entries.is_null() && !entries.is_array()) fail_user("added_tokens must be an array");
  const int64_t most = highest_id(parts.id_of_spelling.size() + entries.size());
  TextNormalizer normalizer(parts.normalizer);
  std::vector<AddedToken> early, late;
  for (const json& entry : entries) {
    AddedToken token = read_added_token(entry);
    token.id = read_id(token.content, field(entry, "id"), most);
    const auto known = parts.id_of_spelling.find(token.content);
    if (known == parts.id_of_spelling.end()) {
      add_token(parts, token.content, token.id);
    } else if (token.id != known->second) {
      fail_user("added_tokens: '{}' has the id {}, but the vocabulary says {}", token.content,
                token.id, known->second);
    }
    if (token.special) parts.is_special[static_cast<size_t>(token.id)] = true;
    if (token.normalized) normalize(token, normalizer);
    parts.decoded_of_id[static_cast<size_t>(token.id)] = token.content;
    (token.normalized ? late : early).push_back(std::move(token));
  }
  parts.early_tokens = AddedTokenFinder(std::move(early));
  parts.late_tokens = AddedTokenFinder(std::move(late));
}

std::optional<int32_t> id_of(const TokenizerParts& parts, std::string_view spelling) {
  const auto found = parts.id_of_spelling.find(spelling);
  return found == parts.id_of_spelling.end() ? std::nullopt : std::optional(found->second);
}

std::optional<int32_t> first_known(const TokenizerParts& parts,
                                   std::initializer_list<std::string_view> names) {
  for (const auto name : names) {
    if (const auto id = id_of(parts, name)) return id;
  }
  return std::nullopt;
}

// The tokens that end and begin a text: by the template around it, else by their usual names.
void find_ends(const json& post_processor, TokenizerParts& parts) {
  const SpecialTokensAround around = read_post_processor(post_processor);
  if (around.after) parts.eos = id_of(parts, *around.after);
  if (around.before) parts.bos = id_of(parts, *around.before);
  if (!parts.eos) {
    parts.eos =
        first_known(parts, {"<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>"});
  }
  if (!parts.bos) {
    parts.bos = first_known(parts, {"<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<s>"});
  }
}

// Tokens with characters outside the alphabet (most special ones) stand for themselves.
void spell_as_bytes(TokenizerParts& parts) {
  for (auto& token : parts.decoded_of_id) token = from_byte_alphabet(token).value_or(token);
}

void note_bytes(TokenizerParts& parts) {
  for (int byte = 0; byte < 256; ++byte) {
    if (const auto id = id_of(parts, fmt::format("<0x{:02X}>", byte))) {
      parts.is_byte[static_cast<size_t>(*id)] = true;
    }
  }
}

// In the package they change the ids that encoding gives.
void refuse_lengths(const json& file) {
  for (const char* key : {"truncation", "padding"}) {
    if (field(file, key).is_null()) continue;
    fail_user("{} is set: texts are neither cut nor padded here; set it to null", key);
  }
}

TokenizerParts build(const json& file) {
  if (!file.is_object()) fail_user("not a JSON object");
  refuse_lengths(file);
  TokenizerParts parts{.normalizer = Normalizer(field(file, "normalizer")),
                       .pre_tokenizer = PreTokenizer(field(file, "pre_tokenizer")),
                       .decoder = Decoder(field(file, "decoder"))};
  const json& model = field(file, "model");
  SymbolRules rules = read_rules(model, parts.pre_tokenizer.is_byte_level());
  StringIds vocabulary = read_vocabulary(model);
  for (const auto& [spelling, id] : vocabulary) add_token(parts, spelling, id);
  parts.model = BpeModel(read_merges(model, vocabulary));
  if (rules.byte_fallback) note_bytes(parts);
  parts.symbols = SymbolTable(std::move(rules), std::move(vocabulary));
  read_added_tokens(field(file, "added_tokens"), parts);
  if (parts.is_token.empty()) fail_user("model: the vocabulary is empty");
  find_ends(field(file, "post_processor"), parts);
  if (parts.decoder.is_byte_level()) spell_as_bytes(parts);
  return parts;
}

std::optional<int32_t> configured_token(const TokenizerParts& parts, const json& config,
                                        const char* key) {
  const json& value = field(config, key);
  const json& token = value.is_object() ? field(value, "content") : value;
  if (!token.is_string()) return std::nullopt;
  const auto id = id_of(parts, token.get<std::string>());
  if (!id) fail_user("{} is '{}', which is not in the vocabulary", key, token.get<std::string>());
  return id;
}

}  // namespace

TokenizerParts parse_tokenizer(std::string_view text, const std::string& name) {
  const json file = parse_json(text, name);
  try {
    TokenizerParts parts = build(file);
    parts.fingerprint = stable_hash(text);
    return parts;
  } catch (const UserError& error) {
    fail_user("{}: {}", name, error.what());
  } catch (const json::exception& error) {
    fail_user("{}: not a tokenizer.json: {}", name, error.what());
  }
}

void apply_tokenizer_config(TokenizerParts& parts, std::string_view text, const std::string& name) {
  const json config = parse_json(text, name);
  try {
    if (!config.is_object()) fail_user("not a JSON object");
    if (const auto eos = configured_token(parts, config, "eos_token")) parts.eos = eos;
    if (const auto bos = configured_token(parts, config, "bos_token")) parts.bos = bos;
  } catch (const UserError& error) {
    fail_user("{}: {}", name, error.what());
  } catch (const json::exception& error) {
    fail_user("{}: not a JSON object: {}", name, error.what());
  }
}

}  // namespace longhaul::data
