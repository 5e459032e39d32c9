#include "longhaul/data/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstdint>

#include "longhaul/base/error.h"
#include "longhaul/data/unicode_additions.h"

namespace longhaul::data {
namespace {

// Unicode's White_Space; PCRE2's own \s also counts U+180E.
constexpr std::string_view kSpace =
    R"(\x{9}-\x{d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
// Unicode's definition of a word character; PCRE2's own \w leaves out marks.
constexpr std::string_view kWord =
    R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169}\x{1f170}-\x{1f189})";
constexpr std::string_view kHexDigit = "0-9a-fA-F";
constexpr size_t kJitStackBytes = 16 << 20;

// What joined the category `name` ("L", "Lu") after PCRE2's version of Unicode.
std::string unicode_additions(std::string_view name) {
  std::string members;
  if (name.empty()) return members;
  for (const auto& addition : kUnicodeAdditions) {
    if (addition.category.starts_with(name)) members += addition.members;
  }
  return members;
}

std::string word_members() {
  std::string members(kWord);
  for (const char* category : {"L", "M", "Nd", "Nl", "Pc"}) members += unicode_additions(category);
  return members;
}

// Walks over a pattern once, copying or translating its pieces.
class Translator {
 public:
  explicit Translator(std::string_view pattern) : in_(pattern) {}

  std::string run() {
    while (at_ < in_.size()) step();
    return std::move(out_);
  }

 private:
  bool next_is(std::string_view text) const { return in_.substr(at_).starts_with(text); }

  [[noreturn]] void refuse(std::string_view what) const {
    fail_user("the pattern '{}' uses {}, which is not supported", in_, what);
  }

  void copy(size_t count) {
    out_ += in_.substr(at_, count);
    at_ += count;
  }

  void step() {
    if (in_[at_] == '\\') {
      escape();
    } else if (in_class_) {
      class_character();
    } else if (in_[at_] == '[') {
      open_class();
    } else if (next_is("(?")) {
      group();
    } else if (in_[at_] == '}') {
      copy(1);
      if (next_is("+")) refuse("a quantifier behind a quantifier");
    } else {
      copy(1);
    }
  }

  void open_class() {
    in_class_ = true;
    copy(next_is("[^") ? 2 : 1);
    if (next_is("]")) copy(1);
  }

  void class_character() {
    if (next_is("[:")) {
      const size_t end = in_.find(":]", at_);
      if (end == std::string_view::npos) refuse("an unfinished [: :]");
      copy(end + 2 - at_);
      return;
    }
    if (in_[at_] == '[') refuse("a set inside a set");
    if (next_is("&&")) refuse("an intersection of sets");
    if (in_[at_] == ']') in_class_ = false;
    copy(1);
  }

  // Ruby's m makes the dot match newlines and so means s; its ^ and $ always match at lines.
  void group() {
    size_t end = at_ + 2;
    while (end < in_.size() && std::string_view("imx-").find(in_[end]) != std::string_view::npos) {
      ++end;
    }
    const bool is_option = end < in_.size() && (in_[end] == ':' || in_[end] == ')');
    std::string flags(in_.substr(at_, end - at_));
    if (is_option) std::replace(flags.begin(), flags.end(), 'm', 's');
    out_ += flags;
    at_ = end;
  }

  void set(std::string_view members, bool negated) {
    if (in_class_ && negated) {
      copy(2);
    } else if (in_class_) {
      out_ += members;
      at_ += 2;
    } else {
      out_ += fmt::format("[{}{}]", negated ? "^" : "", members);
      at_ += 2;
    }
  }

  void escape() {
    const char kind = at_ + 1 < in_.size() ? in_[at_ + 1] : '\0';
    if (kind == 's' || kind == 'S') return set(kSpace, kind == 'S');
    if (kind == 'w' || kind == 'W') return set(word_members(), kind == 'W');
    if (kind == 'H' && in_class_) refuse("\\H inside a set");
    if (kind == 'h' || kind == 'H') return set(kHexDigit, kind == 'H');
    if (kind == 'u') return unicode_escape();
    const bool braces = (kind == 'p' || kind == 'P' || kind == 'x') && next_brace();
    if (braces && kind != 'x' && property(kind == 'P')) return;
    copy(braces ? in_.find('}', at_) + 1 - at_ : std::min<size_t>(2, in_.size() - at_));
  }

  // \p{L} and the like, with what PCRE2 does not know yet; false for other properties.
  bool property(bool negated) {
    const size_t end = in_.find('}', at_);
    const std::string added = unicode_additions(in_.substr(at_ + 3, end - at_ - 3));
    if (added.empty() || (in_class_ && negated)) return false;
    const std::string_view name = in_.substr(at_ + 2, end + 1 - at_ - 2);
    if (in_class_) {
      out_ += fmt::format("\\p{}{}", name, added);
    } else {
      out_ += fmt::format("[{}\\p{}{}]", negated ? "^" : "", name, added);
    }
    at_ = end + 1;
    return true;
  }

  bool next_brace() const {
    return at_ + 2 < in_.size() && in_[at_ + 2] == '{' &&
           in_.find('}', at_) != std::string_view::npos;
  }

  void unicode_escape() {
    if (at_ + 6 > in_.size()) refuse("an unfinished \\u");
    out_ += fmt::format("\\x{{{}}}", in_.substr(at_ + 2, 4));
    at_ += 6;
  }

  std::string_view in_;
  std::string out_;
  size_t at_ = 0;
  bool in_class_ = false;
};

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

std::string translate_ruby_pattern(std::string_view pattern) { return Translator(pattern).run(); }

Regex::Regex(std::string_view pattern, Kind kind) : pattern_(pattern) {
  const bool literal = kind == Kind::kLiteral;
  const uint32_t options =
      literal ? PCRE2_UTF | PCRE2_LITERAL : PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE;
  const std::string translated = literal ? pattern_ : translate_ruby_pattern(pattern);
  code_ = {compile(translated, options, pattern_), pcre2_code_free};
  jit_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
}

RegexMatcher::RegexMatcher(const Regex& regex)
    : regex_(&regex),
      match_data_(pcre2_match_data_create_from_pattern(regex.code_.get(), nullptr),
                  pcre2_match_data_free),
      context_(pcre2_match_context_create(nullptr), pcre2_match_context_free) {
  // A run of a hundred million blanks is one match with as many steps back: PCRE2's default limit
  // on steps is for hostile patterns, and ours come with the model.
  pcre2_set_match_limit(context_.get(), UINT32_MAX);
  if (regex.jit_) {
    jit_stack_ = {pcre2_jit_stack_create(32 << 10, kJitStackBytes, nullptr), pcre2_jit_stack_free};
    pcre2_jit_stack_assign(context_.get(), nullptr, jit_stack_.get());
  }
}

int RegexMatcher::run(std::string_view subject, size_t from) {
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
    fail_user("the pattern '{}' gave up on a text of {} bytes: {}", regex_->pattern_,
              subject.size(), error_text(result));
  }
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(match_data_.get());
  return Match{ends[0], std::max(ends[0], ends[1])};
}

}  // namespace longhaul::data
