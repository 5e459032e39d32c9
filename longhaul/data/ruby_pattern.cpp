#include "longhaul/data/ruby_pattern.h"

#include <array>
#include <cctype>
#include <optional>
#include <vector>

#include "longhaul/base/error.h"
#include "longhaul/data/unicode_sets.h"

namespace longhaul::data {
namespace {

constexpr std::string_view kHexDigits = "0-9a-fA-F";
constexpr std::string_view kOtherThanHexDigits =
    R"(\x{0}-\x{2f}\x{3a}-\x{40}\x{47}-\x{60}\x{67}-\x{10ffff})";

// What one escape such as \s or \p{L} stands for: the members of a set, or all others.
struct Members {
  std::string text;
  bool negated = false;
};

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
  char character(size_t ahead) const { return at_ + ahead < in_.size() ? in_[at_ + ahead] : '\0'; }

  [[noreturn]] void refuse(std::string_view what) const {
    fail_user("the pattern '{}' uses {}, which is not supported", in_, what);
  }

  void copy(size_t count, std::string& to) {
    to += in_.substr(at_, count);
    at_ += count;
  }

  void step() {
    const char c = in_[at_];
    if (c == '\\') return escape();
    if (c == '[') return set();
    if (c == '(') return open_group();
    if (c == ')') return close_group();
    if (c == '{') return counted();
    if (caseless()) check_caseless();
    copy(1, out_);
  }

  // --- groups

  struct Group {
    bool caseless;
  };
  bool caseless() const { return !groups_.empty() && groups_.back().caseless; }

  void open_group() {
    if (next_is("(*")) refuse("(*");
    if (!next_is("(?")) {
      groups_.push_back({caseless()});
      return copy(1, out_);
    }
    if (next_is("(?#")) return comment();
    for (const std::string_view kind : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>"}) {
      if (!next_is(kind)) continue;
      groups_.push_back({caseless()});
      return copy(kind.size(), out_);
    }
    options();
  }

  void close_group() {
    if (!groups_.empty()) groups_.pop_back();
    copy(1, out_);
  }

  void comment() {
    const size_t end = in_.find(')', at_);
    if (end == std::string_view::npos) refuse("an unfinished comment");
    at_ = end + 1;
  }

  // (?i:...) and the like. Ruby's m makes the dot match newlines and so means s here; its ^ and $
  // always match at lines. Without the colon an option reaches to the end of the group, but Ruby
  // cuts alternatives differently then, so that it may stand at the very beginning only.
  void options() {
    size_t end = at_ + 2;
    std::string flags;
    bool on = true, is_caseless = caseless();
    for (; std::string_view("im-").find(in_.substr(end, 1)) != std::string_view::npos; ++end) {
      if (end >= in_.size()) break;
      if (in_[end] == '-') on = false;
      if (in_[end] == 'i') is_caseless = on;
      flags += in_[end] == 'm' ? 's' : in_[end];
    }
    const char last = end < in_.size() ? in_[end] : '\0';
    const bool at_front = at_ == 0 && last == ')';
    if (flags.empty() || (last != ':' && !at_front)) {
      refuse(fmt::format("the group '{}'", in_.substr(at_, end + 1 - at_)));
    }
    groups_.push_back({is_caseless});  // the option at the front holds until the end
    out_ += "(?" + flags + last;
    at_ = end + 1;
  }

  // Where case does not matter, Oniguruma also takes one character for several ('ss' for the sharp
  // s, 'fi' for the ligature); PCRE2 does not.
  void check_caseless() const {
    if (static_cast<uint8_t>(in_[at_]) >= 0x80) refuse("a letter beyond ASCII in a caseless group");
    const auto lower = [&](size_t ahead) {
      return static_cast<char>(std::tolower(static_cast<unsigned char>(character(ahead))));
    };
    for (const std::string_view pair : {"ss", "st", "ff", "fi", "fl"}) {
      if (lower(0) == pair[0] && lower(1) == pair[1]) {
        refuse(fmt::format("'{}' in a caseless group", pair));
      }
    }
  }

  // --- {n,m}

  void counted() {
    const size_t end = in_.find('}', at_);
    const std::string_view inside =
        end == std::string_view::npos ? "" : in_.substr(at_ + 1, end - at_ - 1);
    if (!is_count(inside)) {
      out_ += "\\{";  // a plain character
      ++at_;
      return;
    }
    at_ = end + 1;
    if (next_is("+")) refuse("a quantifier behind a quantifier");
    if (next_is("?") && inside.find(',') == std::string_view::npos) refuse("{n}?");
    out_ += inside[0] == ',' ? fmt::format("{{0{}}}", inside) : fmt::format("{{{}}}", inside);
  }

  static bool is_count(std::string_view text) {
    const size_t comma = text.find(',');
    const auto is_number = [](std::string_view digits) {
      return digits.find_first_not_of("0123456789") == std::string_view::npos;
    };
    if (text.empty() || text == ",") return false;
    if (comma == std::string_view::npos) return is_number(text);
    return is_number(text.substr(0, comma)) && is_number(text.substr(comma + 1));
  }

  // --- escapes

  void escape() {
    if (const auto members = members_escape()) {
      out_ += fmt::format("[{}{}]", members->negated ? "^" : "", members->text);
    } else if (next_is("\\b") || next_is("\\B")) {
      word_boundary();
    } else if (next_is("\\A") || next_is("\\z") || next_is("\\Z")) {
      copy(2, out_);
    } else {
      plain_escape(out_);
    }
  }

  void word_boundary() {
    const std::string word = "[" + ruby_word_members() + "]";
    const bool inside = in_[at_ + 1] == 'B';
    out_ += fmt::format("(?:(?<={0})(?{1}{0})|(?<!{0})(?{2}{0}))", word, inside ? "=" : "!",
                        inside ? "!" : "=");
    at_ += 2;
  }

  // \s, \w, \d, \h, \p{..} and their opposites; steps over it.
  std::optional<Members> members_escape() {
    const char kind = character(1);
    if (kind == 'p' || kind == 'P') return property();
    const char lower = static_cast<char>(std::tolower(static_cast<unsigned char>(kind)));
    Members members{.text = {}, .negated = kind != lower};
    if (lower == 's') {
      members = {std::string(kind == 's' ? space_members() : other_than_space_members())};
    } else if (lower == 'h') {
      members = {std::string(kind == 'h' ? kHexDigits : kOtherThanHexDigits)};
    } else if (lower == 'w') {
      members.text = ruby_word_members();
    } else if (lower == 'd') {
      members.text = *property_members("Nd");
    } else {
      return std::nullopt;
    }
    at_ += 2;
    return members;
  }

  Members property() {
    const size_t end = in_.find('}', at_);
    if (character(2) != '{' || end == std::string_view::npos) refuse("an unfinished \\p");
    std::string_view name = in_.substr(at_ + 3, end - at_ - 3);
    const bool crossed = name.starts_with("^");
    if (crossed) name.remove_prefix(1);
    const auto members = property_members(name);
    if (!members) refuse(fmt::format("\\p{{{}}}", name));
    const bool negated = crossed != (character(1) == 'P');
    at_ = end + 1;
    return {*members, negated};
  }

  // Those that mean one character.
  void plain_escape(std::string& to) {
    const char kind = character(1);
    if (kind == '\0') refuse("a backslash at the end");
    if (kind == 'u') return unicode_escape(to);
    if (kind == 'x') return hex_escape(to);
    if (kind == 'v') {
      to += "\\x{b}";
      at_ += 2;
      return;
    }
    const bool known = std::string_view("tnrfae").find(kind) != std::string_view::npos;
    if (!known && std::isalnum(static_cast<unsigned char>(kind))) {
      refuse(fmt::format("\\{}", kind));
    }
    // Before a character of several bytes the backslash says nothing.
    if (static_cast<uint8_t>(kind) >= 0x80) {
      ++at_;
      if (caseless()) check_caseless();
      return copy(1, to);
    }
    copy(2, to);
  }

  void unicode_escape(std::string& to) {
    const std::string_view digits = in_.substr(std::min(at_ + 2, in_.size()), 4);
    if (!is_hex(digits, 4, 4)) refuse("an unfinished \\u");
    to += fmt::format("\\x{{{}}}", digits);
    at_ += 6;
  }

  void hex_escape(std::string& to) {
    const size_t end = in_.find('}', at_);
    const bool braces = character(2) == '{' && end != std::string_view::npos;
    const std::string_view digits =
        braces ? in_.substr(at_ + 3, end - at_ - 3) : in_.substr(std::min(at_ + 2, in_.size()), 2);
    // Above 7F two digits would be a byte and not a character.
    if (!is_hex(digits, braces ? 1 : 2, braces ? 6 : 2) || (!braces && digits[0] > '7')) {
      refuse("this form of \\x");
    }
    to += fmt::format("\\x{{{}}}", digits);
    at_ = braces ? end + 1 : at_ + 4;
  }

  static bool is_hex(std::string_view digits, size_t least, size_t most) {
    return digits.size() >= least && digits.size() <= most &&
           digits.find_first_not_of("0123456789abcdefABCDEF") == std::string_view::npos;
  }

  // --- sets

  // PCRE2 has no set for "all but these" inside a set, so those stand beside it as alternatives.
  void set() {
    const bool negated = next_is("[^");
    at_ += negated ? 2 : 1;
    std::string inside;
    std::vector<std::string> others;
    if (next_is("]")) {
      inside += "\\]";
      ++at_;
    }
    while (!next_is("]")) set_member(inside, others);
    ++at_;
    out_ += set_of(negated, inside, others);
  }

  static std::string set_of(bool negated, const std::string& inside,
                            const std::vector<std::string>& others) {
    const std::string plain =
        inside.empty() ? "" : fmt::format("[{}{}]", negated ? "^" : "", inside);
    if (others.empty()) return plain;
    std::string text;
    for (const auto& other : others) {
      if (negated) {
        text += fmt::format("(?=[{}])", other);
      } else {
        text += fmt::format("{}[^{}]", text.empty() ? "" : "|", other);
      }
    }
    if (negated) return fmt::format("(?:{}{})", text, plain.empty() ? "(?s:.)" : plain);
    return fmt::format("(?:{}{}{})", text, plain.empty() ? "" : "|", plain);
  }

  void set_member(std::string& inside, std::vector<std::string>& others) {
    if (at_ >= in_.size()) refuse("an unfinished set");
    if (next_is("[:")) refuse("a POSIX set ([: :])");
    if (next_is("[")) refuse("a set inside a set");
    if (next_is("&&")) refuse("an intersection of sets");
    if (in_[at_] != '\\') {
      if (caseless() && static_cast<uint8_t>(in_[at_]) >= 0x80) check_caseless();
      return copy(1, inside);
    }
    if (const auto members = members_escape()) {
      // An end of a range would become a dash of its own; Oniguruma refuses it as well.
      if (next_is("-") && character(1) != ']') refuse("a range that begins with a set");
      if (members->negated) {
        others.push_back(members->text);
      } else {
        inside += members->text;
      }
      return;
    }
    if (next_is("\\b")) refuse("\\b inside a set");
    plain_escape(inside);
  }

  std::string_view in_;
  std::string out_;
  size_t at_ = 0;
  std::vector<Group> groups_;
};

}  // namespace

std::string translate_ruby_pattern(std::string_view pattern) { return Translator(pattern).run(); }

}  // namespace longhaul::data
