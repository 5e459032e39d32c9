// The added_tokens of a tokenizer.json: strings that are found in the text itself, before it is cut
// into pieces (special tokens among them). The longest one at the leftmost place wins. Called by
// Tokenizer.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace longhaul::data {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false;
  // With true the token is looked for after normalisation, that is, after all the others.
  bool normalized = false;
  bool lstrip = false, rstrip = false;  // take the blanks on that side along
};

// Finds the tokens of one set; immutable.
class AddedTokenFinder {
 public:
  AddedTokenFinder() = default;
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  struct Hit {
    size_t begin, end;  // with the blanks that it takes along
    int32_t id;
  };
  // The first token that begins at or after `from`; blanks before `from` are not taken along.
  std::optional<Hit> find(std::string_view text, size_t from) const;

  bool empty() const { return tokens_.empty(); }

 private:
  struct Node {
    std::vector<std::pair<char, uint32_t>> children;
    int32_t token = -1;  // index into tokens_
  };
  uint32_t child(uint32_t node, char byte) const;
  int32_t longest_at(std::string_view text, size_t at) const;
  void insert(std::string_view content, int32_t index);
  Hit hit_of(const AddedToken& token, std::string_view text, size_t begin, size_t from) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;  // a trie; the root is node 0
  std::array<bool, 256> starts_{};
};

}  // namespace longhaul::data
