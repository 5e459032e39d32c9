#include "longhaul/data/added_tokens.h"

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/data/unicode.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {

AddedTokenFinder::AddedTokenFinder(std::vector<AddedToken> tokens)
    : tokens_(std::move(tokens)), nodes_(1) {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    insert(tokens_[i].content, static_cast<int32_t>(i));
    starts_[static_cast<uint8_t>(tokens_[i].content[0])] = true;
  }
}

uint32_t AddedTokenFinder::child(uint32_t node, char byte) const {
  for (const auto& [key, next] : nodes_[node].children) {
    if (key == byte) return next;
  }
  return 0;
}

void AddedTokenFinder::insert(std::string_view content, int32_t index) {
  uint32_t node = 0;
  for (const char byte : content) {
    uint32_t next = child(node, byte);
    if (next == 0) {
      next = static_cast<uint32_t>(nodes_.size());
      nodes_[node].children.emplace_back(byte, next);
      nodes_.emplace_back();
    }
    node = next;
  }
  if (nodes_[node].token >= 0) {
    fail_user("added_tokens: two tokens read '{}' once they are normalized", content);
  }
  nodes_[node].token = index;
}

AddedTokenFinder::Hit AddedTokenFinder::longest_at(std::string_view text, size_t begin) const {
  Hit longest{begin, begin, -1};
  uint32_t node = 0;
  for (size_t at = begin; at < text.size(); ++at) {
    node = child(node, text[at]);
    if (node == 0) break;
    if (nodes_[node].token >= 0) longest = {begin, at + 1, nodes_[node].token};
  }
  return longest;
}

std::optional<AddedTokenFinder::Hit> AddedTokenFinder::find(std::string_view text,
                                                            size_t from) const {
  if (tokens_.empty()) return std::nullopt;
  for (size_t at = from; at < text.size(); ++at) {
    if (!starts_[static_cast<uint8_t>(text[at])]) continue;
    const Hit hit = longest_at(text, at);
    if (hit.token >= 0) return hit;
  }
  return std::nullopt;
}

bool AddedTokenFinder::accept(std::string_view text, size_t from, Hit& hit) const {
  const AddedToken& token = tokens_[static_cast<size_t>(hit.token)];
  if (token.single_word) {
    const auto is_word = [&](size_t at) {
      return is_word_character(code_point_at(text, at).value);
    };
    if (hit.begin > 0 && is_word(begin_of_character_before(text, hit.begin))) return false;
    if (hit.end < text.size() && is_word(hit.end)) return false;
  }
  if (token.lstrip) {
    hit.begin = std::max(begin_of_trailing_space(text.substr(0, hit.begin)), from);
  }
  if (token.rstrip) hit.end += end_of_leading_space(text.substr(hit.end));
  return true;
}

}  // namespace longhaul::data
