#include "longhaul/train/bigram.h"

#include <cmath>
#include <unordered_map>

#include "longhaul/base/error.h"

namespace longhaul::train {
namespace {

// The unigram's weight, in counts; between 1 and 100 it hardly matters on text.
constexpr double kUnigramCounts = 8;

class Bigram {
 public:
  explicit Bigram(int64_t vocab_size)
      : vocab_size_(vocab_size), unigram_(vocab_size, 0), context_(vocab_size, 0) {}

  void count(const data::Row& row, int64_t seq_len) {
    for (int64_t t = 0; t < seq_len; ++t) {
      if (row.labels[t] < 0) continue;
      ++unigram_[row.labels[t]];
      ++context_[row.input_ids[t]];
      ++pairs_[key(row.input_ids[t], row.labels[t])];
      ++total_;
    }
  }

  double log_probability(int32_t a, int32_t b) const {
    const auto found = pairs_.find(key(a, b));
    const double pair = found == pairs_.end() ? 0 : static_cast<double>(found->second);
    const double unigram =
        (static_cast<double>(unigram_[b]) + 1) / static_cast<double>(total_ + vocab_size_);
    return std::log((pair + kUnigramCounts * unigram) /
                    (static_cast<double>(context_[a]) + kUnigramCounts));
  }

 private:
  static uint64_t key(int32_t a, int32_t b) {
    return static_cast<uint64_t>(a) << 32 | static_cast<uint32_t>(b);
  }

  int64_t vocab_size_, total_ = 0;
  std::vector<int64_t> unigram_, context_;
  std::unordered_map<uint64_t, int64_t> pairs_;
};

}  // namespace

ValidationResult bigram_baseline(const data::Dataset& training, const data::Dataset& held_out,
                                 int64_t vocab_size, int64_t max_rows) {
  Bigram bigram(vocab_size);
  const uint64_t in_a_pass = training.rows_in_a_pass();
  for (uint64_t i = 0; i < in_a_pass; ++i) {
    bigram.count(training.row(i), training.shape().seq_len);
  }
  double sum = 0;
  int64_t labels = 0, bytes = 0;
  const auto is_wanted = [&](uint64_t i) {
    return (max_rows < 0 || i < static_cast<uint64_t>(max_rows)) && held_out.has_row(i);
  };
  for (uint64_t i = 0; is_wanted(i); ++i) {
    const data::Row row = held_out.row(i);
    for (int64_t t = 0; t < held_out.shape().seq_len; ++t) {
      if (row.labels[t] < 0) continue;
      sum -= bigram.log_probability(row.input_ids[t], row.labels[t]);
      ++labels;
    }
    bytes += held_out.label_bytes(row).value_or(0);
  }
  ValidationResult result{.loss = sum / static_cast<double>(std::max<int64_t>(labels, 1)),
                          .labels = labels,
                          .bits_per_byte = {}};
  if (bytes > 0) result.bits_per_byte = sum / std::log(2.0) / static_cast<double>(bytes);
  return result;
}

}  // namespace longhaul::train
