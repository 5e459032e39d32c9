#include "longhaul/data/added_tokens.h"

#include "longhaul/base/error.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

bool is_white_space(char32_t c) {
  return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

size_t after_blanks(std::string_view text, size_t at) {
  while (at < text.size()) {
    const CodePoint c = code_point_at(text, at);
    if (!is_white_space(c.value)) break;
    at += c.length;
  }
  return at;
}

size_t before_blanks(std::string_view text, size_t at, size_t stop) {
  while (at > stop) {
    size_t begin = at - 1;
    while (begin > stop && (static_cast<uint8_t>(text[begin]) & 0xC0) == 0x80) --begin;
    if (!is_white_space(code_point_at(text, begin).value)) break;
    at = begin;
  }
  return at;
}

}  // namespace

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
  LONGHAUL_CHECK(!content.empty(), "an added token is empty");
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
  nodes_[node].token = index;
}

int32_t AddedTokenFinder::longest_at(std::string_view text, size_t at) const {
  int32_t longest = -1;
  uint32_t node = 0;
  for (; at < text.size(); ++at) {
    node = child(node, text[at]);
    if (node == 0) break;
    if (nodes_[node].token >= 0) longest = nodes_[node].token;
  }
  return longest;
}

AddedTokenFinder::Hit AddedTokenFinder::hit_of(const AddedToken& token, std::string_view text,
                                               size_t begin, size_t from) const {
  const size_t end = begin + token.content.size();
  return {token.lstrip ? before_blanks(text, begin, from) : begin,
          token.rstrip ? after_blanks(text, end) : end, token.id};
}

std::optional<AddedTokenFinder::Hit> AddedTokenFinder::find(std::string_view text,
                                                            size_t from) const {
  for (size_t at = from; at < text.size(); ++at) {
    if (!starts_[static_cast<uint8_t>(text[at])]) continue;
    const int32_t index = longest_at(text, at);
    if (index >= 0) return hit_of(tokens_[static_cast<size_t>(index)], text, at, from);
  }
  return std::nullopt;
}

}  // namespace longhaul::data
