// The regular expressions of tokenizer.json files, run by PCRE2 with its JIT compiler. They are
// written for Oniguruma's Ruby syntax; what means something else there is translated, and what
// cannot be translated is an error that names it. Called by the pre-tokenizer only.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace longhaul::data {

// The pattern in PCRE2's words; UserError for what has no counterpart.
std::string translate_ruby_pattern(std::string_view pattern);

// A compiled pattern; immutable, shared by threads.
class Regex {
 public:
  enum class Kind { kRuby, kLiteral };
  explicit Regex(std::string_view pattern, Kind kind = Kind::kRuby);

 private:
  friend class RegexMatcher;
  std::string pattern_;
  std::shared_ptr<pcre2_real_code_8> code_;
  bool jit_ = false;
};

struct Match {
  size_t begin, end;
};

// What one thread needs to run a Regex, which must outlive it.
class RegexMatcher {
 public:
  explicit RegexMatcher(const Regex& regex);

  // The leftmost match at or after `from` in valid UTF-8. Time is bounded by PCRE2's limits only;
  // running into one of them is a UserError.
  std::optional<Match> find(std::string_view subject, size_t from);

 private:
  int run(std::string_view subject, size_t from);

  const Regex* regex_;
  std::shared_ptr<pcre2_real_match_data_8> match_data_;
  std::shared_ptr<pcre2_real_jit_stack_8> jit_stack_;
  std::shared_ptr<pcre2_real_match_context_8> context_;
};

}  // namespace longhaul::data
