// Documents as ids: every file once through the tokenizer, each followed by the end-of-text token.
// It knows no rows; packed_dataset.h cuts them. Called where a run opens its data.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "longhaul/data/file_list.h"
#include "longhaul/data/text_file.h"
#include "longhaul/data/tokenizer.h"

namespace longhaul::data {

struct TokenizedCorpus {
  std::vector<int32_t> ids;             // all documents, one behind the other
  std::vector<uint64_t> document_ends;  // places in ids; ascending
  std::vector<uint32_t> token_bytes;    // text bytes of each id of the vocabulary; may be empty
  int64_t text_bytes = 0;
  int64_t empty_files = 0;     // skipped
  int64_t replaced_files = 0;  // not valid text, and repaired
};

struct TokenizeOptions {
  int num_threads = 2;
  InvalidText on_invalid = InvalidText::kStop;
  // Called with bytes done and bytes in all, from one thread at a time.
  std::function<void(int64_t done, int64_t total)> progress = {};
};

// The result does not depend on the number of threads. Memory: 4 bytes a token, and the text of the
// files in work. UserError for an unreadable file, for one that is not text (text_file.h), for a
// tokenizer without an end-of-text token, and when all files are empty.
TokenizedCorpus tokenize_files(const std::vector<CorpusFile>& files, const Tokenizer& tokenizer,
                               const TokenizeOptions& options = {});

}  // namespace longhaul::data
