#include "longhaul/data/tokenizer_file.h"

#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "longhaul/base/error.h"
#include "longhaul/base/json.h"
#include "longhaul/base/rng.h"
#include "longhaul/data/byte_alphabet.h"

namespace longhaul::data {
namespace {

using nlohmann::json;

// Ids index tables, so a mistyped id must not ask for all memory.
constexpr int64_t kMaxVocabulary = int64_t{1} << 24;

const json& field(const json& object, const char* key) {
  static const json null;
  const auto found = object.find(key);
  return found == object.end() ? null : *found;
}

bool flag(const json& object, const char* key) {
  const json& value = field(object, key);
  return value.is_boolean() && value.get<bool>();
}

std::string type_of(const json& component) {
  return component.is_object() ? component.value("type", "") : "";
}

// A sequence with nothing in it, as some published files have, is as good as none.
void check_normalizer(const json& normalizer) {
  if (normalizer.is_null()) return;
  const std::string type = type_of(normalizer);
  if (type == "Sequence") {
    for (const json& part : normalizer.at("normalizers")) check_normalizer(part);
    return;
  }
  fail_user("normalizer: the type '{}' is not supported (known: none)", type);
}

void check_decoder(const json& decoder) {
  if (decoder.is_null()) return;
  const std::string type = type_of(decoder);
  if (type != "ByteLevel") {
    fail_user("decoder: the type '{}' is not supported (known: ByteLevel)", type);
  }
}

void check_model(const json& model) {
  if (!model.is_object()) fail_user("model: missing");
  const std::string type = model.value("type", "BPE");
  if (type != "BPE") fail_user("model: the type '{}' is not supported (known: BPE)", type);
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json& value = field(model, key);
    if (value.is_string() && !value.get<std::string>().empty()) {
      fail_user("model: {} is not supported", key);
    }
  }
  if (flag(model, "byte_fallback")) fail_user("model: byte_fallback is not supported");
  const json& dropout = field(model, "dropout");
  if (dropout.is_number() && dropout.get<double>() != 0) {
    fail_user("model: dropout is not supported");
  }
  if (!field(model, "vocab").is_object() || !field(model, "merges").is_array()) {
    fail_user("model: vocab must be an object and merges an array");
  }
}

void add_token(TokenizerParts& parts, const std::string& spelling, const json& id_json) {
  const int64_t id = id_json.is_number_integer() ? id_json.get<int64_t>() : -1;
  if (id < 0 || id >= kMaxVocabulary) {
    fail_user("the token '{}' has the id {}, expected a number from 0 to {}", spelling,
              id_json.dump(), kMaxVocabulary - 1);
  }
  const auto index = static_cast<size_t>(id);
  if (parts.is_token.size() <= index) {
    parts.is_token.resize(index + 1);
    parts.is_special.resize(index + 1);
    parts.bytes_of_id.resize(index + 1);
  }
  if (parts.is_token[index]) fail_user("two tokens have the id {}, one is '{}'", id, spelling);
  parts.is_token[index] = true;
  parts.id_of_spelling.emplace(spelling, static_cast<int32_t>(id));
  // Tokens with characters outside the alphabet (most special ones) stand for themselves.
  parts.bytes_of_id[index] = from_byte_alphabet(spelling).value_or(spelling);
}

std::pair<std::string, std::string> merge_parts(const json& merge, size_t rank) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return {merge[0].get<std::string>(), merge[1].get<std::string>()};
  }
  if (merge.is_string()) {
    const auto& text = merge.get_ref<const std::string&>();
    const size_t blank = text.find(' ');
    if (blank != std::string::npos && text.find(' ', blank + 1) == std::string::npos) {
      return {text.substr(0, blank), text.substr(blank + 1)};
    }
  }
  fail_user("model: merge number {} is {}, expected \"a b\" or [\"a\", \"b\"]", rank, merge.dump());
}

std::vector<Merge> read_merges(const json& merges, const TokenizerParts& parts) {
  std::vector<Merge> result;
  result.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto [left, right] = merge_parts(merges[rank], rank);
    const auto id_of = [&, l = left, r = right](const std::string& token) {
      const auto found = parts.id_of_spelling.find(token);
      if (found == parts.id_of_spelling.end()) {
        fail_user("model: merge number {} ('{}' and '{}') needs the token '{}', which is missing",
                  rank, l, r, token);
      }
      return found->second;
    };
    result.push_back({id_of(left), id_of(right), id_of(left + right)});
  }
  return result;
}

BpeModel build_model(const json& model, const TokenizerParts& parts) {
  std::array<int32_t, 256> byte_ids;
  for (int byte = 0; byte < 256; ++byte) {
    const auto found =
        parts.id_of_spelling.find(to_byte_alphabet(std::string(1, static_cast<char>(byte))));
    byte_ids[static_cast<size_t>(byte)] = found == parts.id_of_spelling.end() ? -1 : found->second;
  }
  std::vector<uint32_t> lengths;
  for (const auto& bytes : parts.bytes_of_id) lengths.push_back(narrow<uint32_t>(bytes.size()));
  return BpeModel(byte_ids, std::move(lengths), read_merges(model.at("merges"), parts));
}

AddedToken read_added_token(const json& entry) {
  AddedToken token;
  token.content = entry.at("content").get<std::string>();
  if (token.content.empty()) fail_user("added_tokens: a token is empty");
  if (flag(entry, "single_word")) {
    fail_user("added_tokens: '{}' has single_word, which is not supported", token.content);
  }
  token.special = flag(entry, "special");
  token.normalized = flag(entry, "normalized");
  token.lstrip = flag(entry, "lstrip");
  token.rstrip = flag(entry, "rstrip");
  return token;
}

void read_added_tokens(const json& entries, TokenizerParts& parts) {
  std::vector<AddedToken> early, late;
  for (const json& entry : entries) {
    AddedToken token = read_added_token(entry);
    const json& id = entry.at("id");
    const auto known = parts.id_of_spelling.find(token.content);
    if (known == parts.id_of_spelling.end()) {
      add_token(parts, token.content, id);
    } else if (id != known->second) {
      fail_user("added_tokens: '{}' has the id {}, but the vocabulary says {}", token.content,
                id.dump(), known->second);
    }
    token.id = parts.id_of_spelling.at(token.content);
    if (token.special) parts.is_special[static_cast<size_t>(token.id)] = true;
    (token.normalized ? late : early).push_back(std::move(token));
  }
  parts.early_tokens = AddedTokenFinder(std::move(early));
  parts.late_tokens = AddedTokenFinder(std::move(late));
}

std::optional<int32_t> first_known(const TokenizerParts& parts,
                                   std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto found = parts.id_of_spelling.find(name);
    if (found != parts.id_of_spelling.end()) return found->second;
  }
  return std::nullopt;
}

TokenizerParts build(const json& file) {
  if (!file.is_object()) fail_user("not a JSON object");
  check_normalizer(field(file, "normalizer"));
  check_decoder(field(file, "decoder"));
  const json& model = field(file, "model");
  check_model(model);
  TokenizerParts parts{.pre_tokenizer = PreTokenizer(field(file, "pre_tokenizer"))};
  for (const auto& [spelling, id] : model.at("vocab").items()) add_token(parts, spelling, id);
  read_added_tokens(field(file, "added_tokens"), parts);
  if (parts.bytes_of_id.empty()) fail_user("model: the vocabulary is empty");
  parts.model = build_model(model, parts);
  parts.ignore_merges = flag(model, "ignore_merges");
  if (parts.ignore_merges) {
    for (const auto& [spelling, id] : model.at("vocab").items()) {
      if (const auto bytes = from_byte_alphabet(spelling)) {
        parts.id_of_bytes.emplace(*bytes, id.get<int32_t>());
      }
    }
  }
  parts.eos =
      first_known(parts, {"<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>"});
  parts.bos = first_known(parts, {"<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<s>"});
  return parts;
}

std::optional<int32_t> configured_token(const TokenizerParts& parts, const json& config,
                                        const char* key) {
  const json& value = field(config, key);
  const json& token = value.is_object() ? field(value, "content") : value;
  if (!token.is_string()) return std::nullopt;
  const auto found = parts.id_of_spelling.find(token.get<std::string>());
  if (found == parts.id_of_spelling.end()) {
    fail_user("{} is '{}', which is not in the vocabulary", key, token.get<std::string>());
  }
  return found->second;
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
