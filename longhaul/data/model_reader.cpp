#include "longhaul/data/model_reader.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "longhaul/base/error.h"
#include "longhaul/data/component.h"

namespace longhaul::data {
namespace {

using nlohmann::json;

constexpr int64_t kMaxVocabulary = int64_t{1} << 24;

struct Pair {
  std::string left, right;
};

// nullopt for the line that says the version of a merges.txt.
std::optional<Pair> read_merge(const json& merge, size_t rank) {
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return Pair{merge[0].get<std::string>(), merge[1].get<std::string>()};
  }
  if (merge.is_string()) {
    const auto& text = merge.get_ref<const std::string&>();
    if (text.starts_with("#version")) return std::nullopt;
    const size_t blank = text.find(' ');
    if (blank != std::string::npos && text.find(' ', blank + 1) == std::string::npos) {
      return Pair{text.substr(0, blank), text.substr(blank + 1)};
    }
  }
  fail_user("model: merge number {} is {}, expected \"a b\" or [\"a\", \"b\"]", rank, merge.dump());
}

int32_t id_in_merge(const std::string& token, const Pair& pair, size_t rank, const StringIds& ids) {
  const auto found = ids.find(token);
  if (found == ids.end()) {
    fail_user("model: merge number {} ('{}' and '{}') needs the token '{}', which is missing", rank,
              pair.left, pair.right, token);
  }
  return found->second;
}

}  // namespace

SymbolRules read_rules(const json& model, bool byte_level) {
  if (!model.is_object()) fail_user("model: missing");
  const std::string type = field(model, "type").is_null() ? "BPE" : type_of(model);
  if (type != "BPE") fail_user("model: the type '{}' is not supported (known: BPE)", type);
  const json& dropout = field(model, "dropout");
  if (!dropout.is_null() && dropout != 0) fail_user("model: dropout is not supported");
  return {.byte_level = byte_level,
          .byte_fallback = flag(model, "byte_fallback"),
          .unk_token = text_of(model, "unk_token"),
          .fuse_unk = flag(model, "fuse_unk"),
          .continuing_subword_prefix = text_of(model, "continuing_subword_prefix"),
          .end_of_word_suffix = text_of(model, "end_of_word_suffix"),
          .ignore_merges = flag(model, "ignore_merges")};
}

int64_t highest_id(size_t num_tokens) {
  return std::min(kMaxVocabulary - 1, 65536 + 8 * static_cast<int64_t>(num_tokens));
}

int32_t read_id(std::string_view spelling, const json& id, int64_t most) {
  const bool fits = id.is_number_integer() && id >= 0 && id <= most;
  if (!fits) {
    fail_user("the token '{}' has the id {}, expected a number from 0 to {}", spelling, id.dump(),
              most);
  }
  return id.get<int32_t>();
}

StringIds read_vocabulary(const json& model) {
  const json& vocab = field(model, "vocab");
  if (!vocab.is_object()) fail_user("model: vocab must be an object");
  StringIds ids;
  ids.reserve(vocab.size());
  const int64_t most = highest_id(vocab.size());
  for (const auto& [spelling, id] : vocab.items()) {
    ids.emplace(spelling, read_id(spelling, id, most));
  }
  return ids;
}

std::vector<Merge> read_merges(const json& model, const StringIds& ids) {
  const json& merges = field(model, "merges");
  if (!merges.is_array()) fail_user("model: merges must be an array");
  const std::string prefix = text_of(model, "continuing_subword_prefix");
  std::vector<Merge> result;
  result.reserve(merges.size());
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto pair = read_merge(merges[rank], rank);
    if (!pair) continue;
    if (pair->right.size() < prefix.size()) {
      fail_user("model: merge number {}: '{}' is shorter than continuing_subword_prefix", rank,
                pair->right);
    }
    const auto id = [&](const std::string& token) { return id_in_merge(token, *pair, rank, ids); };
    const std::string joined = pair->left + pair->right.substr(prefix.size());
    result.push_back({id(pair->left), id(pair->right), id(joined)});
  }
  return result;
}

}  // namespace longhaul::data
