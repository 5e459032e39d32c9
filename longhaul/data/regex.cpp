#include "longhaul/data/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstdint>

#include "longhaul/base/error.h"
#include "longhaul/data/ruby_pattern.h"

namespace longhaul::data {
namespace {

constexpr size_t kJitStackBytes = 16 << 20;
constexpr uint32_t kHeapKibibytes = 256 << 10;
// Steps back that one match may take: as many as Oniguruma allows, and more in long texts, where a
// run of a hundred million blanks is one match. A pattern whose time explodes ends in an error.
constexpr uint64_t kMatchSteps = 10'000'000;

std::string error_text(int code) {
  unsigned char buffer[256];
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

pcre2_code* compile(const std::string& pattern, uint32_t options, std::string_view as_given) {
  const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int code = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* compiled = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                       options, &code, &offset, context.get());
  if (compiled == nullptr) {
    fail_user("the pattern '{}' does not compile: {} (near character {})", as_given,
              error_text(code), offset);
  }
  return compiled;
}

}  // namespace

Regex::Regex(std::string_view pattern, Kind kind) : pattern_(pattern) {
  const bool literal = kind == Kind::kLiteral;
  const uint32_t options =
      literal ? PCRE2_UTF | PCRE2_LITERAL : PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE;
  const std::string translated = kind == Kind::kRuby ? translate_ruby_pattern(pattern) : pattern_;
  code_ = {compile(translated, options, pattern_), pcre2_code_free};
  jit_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
}

RegexMatcher::RegexMatcher(const Regex& regex)
    : regex_(&regex),
      match_data_(pcre2_match_data_create(1, nullptr), pcre2_match_data_free),
      context_(pcre2_match_context_create(nullptr), pcre2_match_context_free) {
  pcre2_set_heap_limit(context_.get(), kHeapKibibytes);
  if (regex.jit_) {
    jit_stack_ = {pcre2_jit_stack_create(32 << 10, kJitStackBytes, nullptr), pcre2_jit_stack_free};
    pcre2_jit_stack_assign(context_.get(), nullptr, jit_stack_.get());
  }
}

int RegexMatcher::run(std::string_view subject, size_t from) {
  const uint64_t steps = kMatchSteps + 4 * subject.size();
  pcre2_set_match_limit(context_.get(),
                        static_cast<uint32_t>(std::min<uint64_t>(steps, UINT32_MAX)));
  const auto* text = reinterpret_cast<PCRE2_SPTR>(subject.data());
  // Without the UTF check, which would read the whole subject again at every call.
  if (regex_->jit_) {
    const int result = pcre2_jit_match(regex_->code_.get(), text, subject.size(), from, 0,
                                       match_data_.get(), context_.get());
    if (result != PCRE2_ERROR_JIT_STACKLIMIT) return result;
  }
  return pcre2_match(regex_->code_.get(), text, subject.size(), from,
                     PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match_data_.get(), context_.get());
}

std::optional<Match> RegexMatcher::find(std::string_view subject, size_t from) {
  const int result = run(subject, from);
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (result < 0) {
    fail_user("the pattern '{}' gave up on a text of {} bytes: {}; the tokenizer cannot cut it",
              regex_->pattern_, subject.size(), error_text(result));
  }
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(match_data_.get());
  return Match{ends[0], std::max(ends[0], ends[1])};
}

}  // namespace longhaul::data
