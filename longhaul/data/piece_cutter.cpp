#include "longhaul/data/piece_cutter.h"

#include "longhaul/base/error.h"
#include "longhaul/data/byte_alphabet.h"
#include "longhaul/data/utf8.h"

namespace longhaul::data {
namespace {

std::string with_metaspace(const PreTokenizer::Metaspace& metaspace, std::string_view text,
                           bool at_start) {
  using Prepend = PreTokenizer::Metaspace::Prepend;
  std::string out;
  for (const char c : text) {
    if (c == ' ') {
      out += metaspace.replacement;
    } else {
      out += c;
    }
  }
  const bool wanted =
      metaspace.prepend == Prepend::kAlways || (metaspace.prepend == Prepend::kFirst && at_start);
  if (wanted && !out.starts_with(metaspace.replacement)) out.insert(0, metaspace.replacement);
  return out;
}

// Joins the parts of a text as a behavior says, and hands the pieces on.
template <typename Piece>
class PartJoiner {
 public:
  PartJoiner(SplitBehavior behavior, Piece piece) : behavior_(behavior), piece_(piece) {}

  void add(size_t begin, size_t end, bool is_match) {
    if (behavior_ == SplitBehavior::kRemoved && is_match) return;
    if (is_waiting_ && joins(is_match)) {
      waiting_.end = end;
    } else {
      flush();
      waiting_ = {begin, end};
      is_waiting_ = true;
    }
    last_was_match_ = is_match;
  }

  void flush() {
    if (waiting_.begin < waiting_.end) piece_(waiting_.begin, waiting_.end);
    waiting_ = {};
    is_waiting_ = false;
  }

 private:
  // Whether a part belongs to the one before it.
  bool joins(bool is_match) const {
    switch (behavior_) {
      case SplitBehavior::kContiguous:
        return is_match == last_was_match_;
      case SplitBehavior::kMergedWithPrevious:
        return is_match && !last_was_match_;
      case SplitBehavior::kMergedWithNext:
        return !is_match && last_was_match_;
      default:
        return false;
    }
  }

  SplitBehavior behavior_;
  Piece piece_;
  Match waiting_ = {};
  bool is_waiting_ = false;  // an empty match waits, too
  bool last_was_match_ = false;
};

}  // namespace

PieceCutter::PieceCutter(const PreTokenizer& pre_tokenizer) : pre_tokenizer_(&pre_tokenizer) {
  for (const auto& step : pre_tokenizer.steps()) {
    matcher_of_step_.push_back(matchers_.size());
    if (const auto* cut = std::get_if<PreTokenizer::Cut>(&step)) {
      matchers_.emplace_back(cut->pattern);
    }
  }
}

void PieceCutter::run(size_t step, std::string_view text, bool at_start, const Sink& sink) {
  if (text.empty()) return;
  if (step == pre_tokenizer_->steps().size()) return sink(text);
  const auto& what = pre_tokenizer_->steps()[step];
  if (const auto* cut = std::get_if<PreTokenizer::Cut>(&what)) {
    if (cut->behavior == SplitBehavior::kIsolated) return isolate(step, text, at_start, sink);
    split(step, *cut, text, at_start, sink);
  } else if (std::holds_alternative<PreTokenizer::SpellBytes>(what)) {
    run_on_changed(step + 1, to_byte_alphabet(text), at_start, sink);
  } else if (const auto* metaspace = std::get_if<PreTokenizer::Metaspace>(&what)) {
    run_on_changed(step + 1, with_metaspace(*metaspace, text, at_start), at_start, sink);
  } else if (text[0] == ' ') {  // PrefixBlank
    run(step + 1, text, at_start, sink);
  } else {
    run_on_changed(step + 1, " " + std::string(text), at_start, sink);
  }
}

void PieceCutter::run_on_changed(size_t step, const std::string& text, bool at_start,
                                 const Sink& sink) {
  if (text.size() > most_) fail_user("pre_tokenizer: it makes more than {} bytes of a text", most_);
  run(step, text, at_start, sink);
}

// The usual behavior: both the matches and what lies between them are pieces.
void PieceCutter::isolate(size_t step, std::string_view text, bool at_start, const Sink& sink) {
  matchers_[matcher_of_step_[step]].each_part(text, [&](size_t begin, size_t end, bool) {
    run(step + 1, text.substr(begin, end - begin), at_start && begin == 0, sink);
  });
}

void PieceCutter::split(size_t step, const PreTokenizer::Cut& cut, std::string_view text,
                        bool at_start, const Sink& sink) {
  PartJoiner joiner(cut.behavior, [&](size_t begin, size_t end) {
    run(step + 1, text.substr(begin, end - begin), at_start && begin == 0, sink);
  });
  matchers_[matcher_of_step_[step]].each_part(text, [&](size_t begin, size_t end, bool is_match) {
    joiner.add(begin, end, is_match != cut.invert);
  });
  joiner.flush();
}

}  // namespace longhaul::data
