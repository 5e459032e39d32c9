// Command line words to overrides.
#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/base/utf8.h"
#include "longhaul/config/load.h"
#include "longhaul/config/option.h"
#include "longhaul/config/toml_reader.h"

namespace longhaul {
namespace {

bool is_bool_word(const std::string& word) {
  return word == "true" || word == "false" || word == "True" || word == "False";
}

// "training.no_document_mask" to "training.document_mask" where that is a boolean, else "".
std::string negated_key(const std::string& key) {
  const size_t dot = key.rfind('.');
  if (dot == std::string::npos || key.compare(dot + 1, 3, "no_") != 0) return "";
  const std::string positive = key.substr(0, dot + 1) + key.substr(dot + 4);
  const Option* option = find_option(positive);
  return option && option->is_bool() ? positive : "";
}

// Walks over the words; each step takes a key and perhaps its value.
class WordReader {
 public:
  explicit WordReader(const Strings& words) : words_(words) {}

  JobWords read() {
    while (next_ < words_.size()) {
      const std::string word = words_[next_++];
      if (word.starts_with("--")) {
        read_key(word.substr(2));
      } else {
        result_.plain.push_back(word);
      }
    }
    return result_;
  }

 private:
  void read_key(const std::string& word) {
    const size_t equals = word.find('=');
    std::string key = word.substr(0, equals);
    std::replace(key.begin(), key.end(), '-', '_');
    const Option* option = find_option(key);
    if (!option) return read_negation(key, equals != std::string::npos);
    if (equals != std::string::npos) return add(*option, word.substr(equals + 1));
    const bool more = next_ < words_.size() && !words_[next_].starts_with("--");
    if (option->is_bool() && !(more && is_bool_word(words_[next_]))) return add(*option, "true");
    if (!more) fail_user("command line: {}: a value is missing after --{}", option->key, key);
    add(*option, words_[next_++]);
  }

  void read_negation(const std::string& key, bool has_value) {
    const std::string positive = negated_key(key);
    if (positive.empty()) fail_user("command line: {}: unknown key{}", key, key_hint(key));
    if (has_value) fail_user("command line: --{} takes no value", key);
    add(*find_option(positive), "false");
  }

  // A checkpoint keeps the job as JSON, which is UTF-8.
  void add(const Option& option, std::string value) {
    if (const size_t at = first_invalid_utf8(value); at != std::string::npos) {
      fail_user(
          "command line: {}: the value is not UTF-8 text (byte 0x{:02x}); write it in UTF-8, or "
          "rename the file that it names",
          option.key, static_cast<unsigned char>(value[at]));
    }
    result_.overrides.push_back({option.key, std::move(value)});
  }

  const Strings& words_;
  size_t next_ = 0;
  JobWords result_;
};

}  // namespace

JobWords split_words(const Strings& words) { return WordReader(words).read(); }

}  // namespace longhaul
