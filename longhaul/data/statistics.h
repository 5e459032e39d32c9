// What is in a corpus: counts, lengths, repeated documents, and its beginning as training sees it.
// Reads everything once; memory: 12 bytes a document. Called by `longhaul data inspect`.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "longhaul/data/chunk_reader.h"

namespace longhaul::data {

struct CorpusStatistics {
  struct Files {
    int64_t count = 0;
    uint64_t bytes = 0;
  };
  std::map<std::string, Files> files;  // by format
  int64_t documents = 0, tokens = 0, text_bytes = 0;
  int64_t empty_documents = 0, bad_documents = 0, replaced_documents = 0;
  int64_t duplicates = 0;           // documents whose text an earlier one has
  std::vector<uint32_t> lengths;    // in tokens, with the end-of-text token; ascending
  std::vector<int32_t> sample;      // the first ids, at most options.sample_tokens
  std::vector<size_t> sample_ends;  // of the documents that end in the sample; places in it

  // Of the lengths, for a share from 0 to 1. 0 for an empty corpus.
  uint32_t length_at(double share) const;
};

struct StatisticsOptions {
  DocumentOptions documents = {};
  int num_threads = 2;
  size_t sample_tokens = 256;
  std::function<void(int64_t done, int64_t total)> progress = {};
};

// `tokenizer` may be null where all sources are prepared tokens. Errors as ChunkReader.
CorpusStatistics collect(const Sources& sources, const Tokenizer* tokenizer,
                         const StatisticsOptions& options, BadDocuments& bad);

}  // namespace longhaul::data
