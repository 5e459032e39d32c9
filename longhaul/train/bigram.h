// The simplest language model worth beating: the next token given the last one, counted on the
// training data. P(b | a) = (n(a,b) + m P(b)) / (n(a) + m) with P(b) = (n(b) + 1) / (N + V); the
// weight m of the unigram is a fixed count. Called by `longhaul eval --baselines`.
#pragma once

#include "longhaul/data/dataset.h"
#include "longhaul/train/metrics.h"

namespace longhaul::train {

// Counts over one pass of `training`, loss over the labels of `held_out`: its first `max_rows`
// rows, or one pass (-1).
ValidationResult bigram_baseline(const data::Dataset& training, const data::Dataset& held_out,
                                 int64_t vocab_size, int64_t max_rows = -1);

}  // namespace longhaul::train
