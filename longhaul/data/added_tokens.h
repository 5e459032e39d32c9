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
  // With true the token is normalized too, and looked for after normalization, that is, after all
  // the others.
  bool normalized = false;
  bool lstrip = false, rstrip = false;  // take the white space on that side along
  bool single_word = false;             // only where no word character touches it
};

// Finds the tokens of one set; immutable.
class AddedTokenFinder {
 public:
  AddedTokenFinder() = default;
  // UserError if two tokens read the same.
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  // Calls `token(id)` and `between(begin, end)`, which is never empty, in the order of the text.
  template <typename Token, typename Between>
  void split(std::string_view text, Token&& token, Between&& between) const;

 private:
  struct Hit {
    size_t begin, end;
    int32_t token;  // index into tokens_
  };
  std::optional<Hit> find(std::string_view text, size_t from) const;

  struct Node {
    std::vector<std::pair<char, uint32_t>> children;
    int32_t token = -1;
  };
  uint32_t child(uint32_t node, char byte) const;
  Hit longest_at(std::string_view text, size_t at) const;
  void insert(std::string_view content, int32_t index);
  // Takes white space along, behind `from`; false if the token may not stand there.
  bool accept(std::string_view text, size_t from, Hit& hit) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;  // a trie; the root is node 0
  std::array<bool, 256> starts_{};
};

template <typename Token, typename Between>
void AddedTokenFinder::split(std::string_view text, Token&& token, Between&& between) const {
  size_t done = 0;
  for (auto found = find(text, 0); found; found = find(text, found->end)) {
    Hit hit = *found;  // the search goes on behind the token, whatever it takes along
    if (!accept(text, done, hit)) continue;
    if (hit.begin > done) between(done, hit.begin);
    token(tokens_[static_cast<size_t>(hit.token)].id);
    done = hit.end;
  }
  if (done < text.size()) between(done, text.size());
}

}  // namespace longhaul::data
