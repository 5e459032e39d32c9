// A corpus as ids, whole in memory: every document once through the tokenizer, each followed by the
// end-of-text token. It knows no rows; packed_dataset.h and best_fit_dataset.h cut them. Called
// where a run opens its data.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <optional>

#include "longhaul/data/chunk_reader.h"

namespace longhaul::data {

struct TokenizeOptions {
  int num_threads = 2;
  DocumentOptions documents = {};
  Split split = {};
  // A corpus with more text than this is not read to its end.
  uint64_t most_text_bytes = std::numeric_limits<uint64_t>::max();
  // Called with bytes on the disk done and in all, from the caller's thread.
  std::function<void(int64_t done, int64_t total)> progress = {};
};

// Nothing if there is more than options.most_text_bytes of text. The result does not depend on the
// number of threads. Memory: 4 bytes a token, and the text of one chunk. `tokenizer` may be null
// where all sources are prepared tokens. UserError for what is not readable (document.h), for a
// tokenizer without an end-of-text token, and when there is no document at all.
std::optional<TokenizedCorpus> tokenize(const Sources& sources, const Tokenizer* tokenizer,
                                        const TokenizeOptions& options, BadDocuments& bad);

// Looks at the first documents of a corpus of text, up to one that can be read, so that a mistake
// that spoils all of them is found at once. UserError if the first thousand are all bad.
void check_beginning(const Sources& sources, const DocumentOptions& options);

}  // namespace longhaul::data
