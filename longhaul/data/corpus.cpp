#include "longhaul/data/corpus.h"

#include <algorithm>
#include <numeric>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"

namespace longhaul::data {
namespace {

// Room for all ids, as far as what was read lets it be guessed: growing later would hold them
// twice.
void reserve_for(TokenizedCorpus& corpus, uint64_t read, uint64_t total) {
  if (read == 0 || read >= total) return;
  const double per_byte = static_cast<double>(corpus.ids.size()) / static_cast<double>(read);
  corpus.ids.reserve(static_cast<size_t>(1.05 * per_byte * static_cast<double>(total)));
}

void report(const TokenizedCorpus& corpus, const Sources& sources, const TokenizeOptions& options,
            const BadDocuments& bad) {
  if (corpus.document_ends.empty() && options.split.fraction > 0) {
    fail_user(
        "no document of the corpus is on the {} side of validation.split = {}; change it, or give "
        "more documents",
        options.split.held_out ? "validation" : "training", options.split.fraction);
  }
  if (corpus.document_ends.empty() && bad.count() > 0) {
    fail_user("all documents of the corpus are bad or empty ({} bad); there is nothing to learn",
              bad.count());
  }
  if (corpus.document_ends.empty()) {
    fail_user("all {} files of the corpus are empty; there is nothing to learn",
              sources.files.size());
  }
  if (bad.count() > 0) {
    log::warn("{} bad documents are left out, {} are taken", bad.count(),
              corpus.document_ends.size());
  }
  if (corpus.replaced_documents > 0) {
    log::warn(
        "{} of {} documents hold NUL bytes or are not valid UTF-8; these parts read as U+FFFD",
        corpus.replaced_documents, corpus.document_ends.size());
  }
}

}  // namespace

TokenizedCorpus tokenize(const Sources& sources, const Tokenizer* tokenizer,
                         const TokenizeOptions& options, BadDocuments& bad) {
  std::unique_ptr<TextEncoders> encoders;
  if (tokenizer) encoders = std::make_unique<TextEncoders>(*tokenizer, options.num_threads);
  std::vector<size_t> units(sources.units.size());
  std::iota(units.begin(), units.end(), size_t{0});
  ChunkReader reader(
      {&sources, encoders.get(), &bad}, units,
      {.documents = options.documents, .split = options.split, .keep_hashes = options.keep_hashes});
  TokenizedCorpus corpus;
  const uint64_t total = sources.disk_bytes();
  uint64_t done = 0;
  const auto tell = [&](uint64_t now) {
    if (options.progress && now > done) {
      options.progress(static_cast<int64_t>(now), static_cast<int64_t>(total));
    }
    done = std::max(done, now);
  };
  for (bool first = true; reader.next(corpus); first = false) {
    if (first) reserve_for(corpus, reader.consumed(), total);
    tell(std::min(reader.consumed(), total));
  }
  tell(total);
  report(corpus, sources, options, bad);
  if (tokenizer) {
    corpus.token_bytes = vocabulary_of(*tokenizer).token_bytes;
  } else if (sources.vocabulary) {
    corpus.token_bytes = sources.vocabulary->token_bytes;
  }
  return corpus;
}

}  // namespace longhaul::data
