// The regular expressions of tokenizer.json files, run by PCRE2 with its JIT compiler. They are
// written for Oniguruma's Ruby syntax and translated (ruby_pattern.h). Called by the parts of a
// tokenizer that search text.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "longhaul/data/utf8.h"

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace longhaul::data {

// A compiled pattern; immutable, shared by threads.
class Regex {
 public:
  enum class Kind { kRuby, kLiteral, kPcre };
  explicit Regex(std::string_view pattern, Kind kind = Kind::kRuby);

 private:
  friend class RegexMatcher;
  std::string pattern_;
  std::shared_ptr<pcre2_real_code_8> code_;
  bool jit_ = false;
};

struct Match {
  size_t begin = 0, end = 0;
};

// What one thread needs to run a Regex, which must outlive it.
class RegexMatcher {
 public:
  explicit RegexMatcher(const Regex& regex);

  // The leftmost match at or after `from` in valid UTF-8. Time is bounded by PCRE2's limits only;
  // running into one of them is a UserError.
  std::optional<Match> find(std::string_view subject, size_t from);

  // Calls `part(begin, end, is_match)` for all matches and what lies between them, in order. An
  // empty match counts, but not right behind another one.
  template <typename Part>
  void each_part(std::string_view subject, Part&& part);

 private:
  int run(std::string_view subject, size_t from);

  const Regex* regex_;
  std::shared_ptr<pcre2_real_match_data_8> match_data_;
  std::shared_ptr<pcre2_real_jit_stack_8> jit_stack_;
  std::shared_ptr<pcre2_real_match_context_8> context_;
};

template <typename Part>
void RegexMatcher::each_part(std::string_view subject, Part&& part) {
  constexpr size_t kNone = static_cast<size_t>(-1);
  size_t done = 0, from = 0, last_match_end = kNone;
  while (from <= subject.size() && !subject.empty()) {
    const auto match = find(subject, from);
    if (!match) break;
    if (match->begin == match->end && match->end == last_match_end) {
      from += from < subject.size() ? code_point_at(subject, from).length : 1;
      continue;
    }
    if (match->begin > done) part(done, match->begin, false);
    part(match->begin, match->end, true);
    done = from = last_match_end = match->end;
  }
  if (done < subject.size()) part(done, subject.size(), false);
}

}  // namespace longhaul::data
