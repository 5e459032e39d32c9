#include "longhaul/data/corpus.h"

#include <algorithm>
#include <numeric>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/base/quiet.h"
#include "longhaul/base/text.h"

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

std::optional<TokenizedCorpus> tokenize(const Sources& sources, const Tokenizer* tokenizer,
                                        const TokenizeOptions& options, BadDocuments& bad) {
  std::unique_ptr<TextEncoders> encoders;
  if (tokenizer) encoders = std::make_unique<TextEncoders>(*tokenizer, options.num_threads);
  std::vector<size_t> units(sources.units.size());
  std::iota(units.begin(), units.end(), size_t{0});
  ChunkReader::Context context{.sources = sources, .encoders = encoders.get(), .bad = bad};
  ChunkReader reader(context, units, {.documents = options.documents, .split = options.split});
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
    if (static_cast<uint64_t>(corpus.text_bytes) > options.most_text_bytes) return std::nullopt;
    if (first) reserve_for(corpus, reader.consumed(), total);
    tell(std::min(reader.consumed(), total));
  }
  tell(total);
  report(corpus, sources, options, bad);
  const auto vocabulary = vocabulary_of(sources, tokenizer);
  corpus.token_bytes = vocabulary.token_bytes;
  corpus.identity = {.tokenizer = vocabulary.fingerprint, .files = sources.fingerprint()};
  return corpus;
}

void check_beginning(const Sources& sources, const DocumentOptions& options) {
  constexpr int64_t kMostBad = 1000;
  const Quiet quiet(true);  // they are told when they are read
  BadDocuments bad(options.skip_bad, kMostBad);
  Document document;
  for (const Unit& unit : sources.units) {
    const SourceFile& file = sources.files[unit.file];
    if (file.shard || open_documents(file, unit, options, bad)->next(document)) return;
  }
  if (bad.count() > 0) {
    fail_user("all {} documents of the corpus are bad ({})", with_commas(bad.count()), bad.first());
  }
}

}  // namespace longhaul::data
