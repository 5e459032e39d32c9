// Runs a PreTokenizer on texts. Called by Encoder and the trainer.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "longhaul/data/growth_limit.h"
#include "longhaul/data/pre_tokenizer.h"

namespace longhaul::data {

// One thread's state for cutting; the PreTokenizer must outlive it.
class PieceCutter {
 public:
  using Sink = std::function<void(std::string_view)>;

  explicit PieceCutter(const PreTokenizer& pre_tokenizer);

  // Hands the pieces of `text` (valid UTF-8) to `sink` in order; none is empty. A piece is valid
  // during the call only. UserError where a hostile file blows one up. `at_start`: `text` begins
  // where the whole text does.
  void cut(std::string_view text, const Sink& sink, bool at_start = true) {
    most_ = most_bytes_from(text.size());
    run(0, text, at_start, sink);
  }

 private:
  void run(size_t step, std::string_view text, bool at_start, const Sink& sink);
  void run_on_changed(size_t step, const std::string& text, bool at_start, const Sink& sink);
  void isolate(size_t step, std::string_view text, bool at_start, const Sink& sink);
  void split(size_t step, const PreTokenizer::Cut& cut, std::string_view text, bool at_start,
             const Sink& sink);

  const PreTokenizer* pre_tokenizer_;
  std::vector<RegexMatcher> matchers_;  // one a Cut, in their order
  std::vector<size_t> matcher_of_step_;
  size_t most_ = 0;  // bytes that a piece may grow to
};

}  // namespace longhaul::data
