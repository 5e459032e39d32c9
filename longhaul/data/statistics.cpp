#include "longhaul/data/statistics.h"

#include <algorithm>
#include <numeric>

#include "longhaul/base/error.h"

namespace longhaul::data {
namespace {

void add(const TokenizedCorpus& chunk, const StatisticsOptions& options, CorpusStatistics& sum,
         std::vector<uint64_t>& hashes) {
  uint64_t begin = 0;
  for (const uint64_t end : chunk.document_ends) {
    sum.lengths.push_back(static_cast<uint32_t>(end - begin));
    begin = end;
    const size_t place = static_cast<size_t>(sum.tokens) + end;
    if (place <= options.sample_tokens) sum.sample_ends.push_back(place);
  }
  const size_t wanted = options.sample_tokens - std::min(options.sample_tokens, sum.sample.size());
  sum.sample.insert(sum.sample.end(), chunk.ids.begin(),
                    chunk.ids.begin() + static_cast<ptrdiff_t>(std::min(wanted, chunk.ids.size())));
  hashes.insert(hashes.end(), chunk.text_hashes.begin(), chunk.text_hashes.end());
  sum.documents += static_cast<int64_t>(chunk.document_ends.size());
  sum.tokens += static_cast<int64_t>(chunk.ids.size());
  sum.text_bytes += chunk.text_bytes;
  sum.empty_documents += chunk.empty_documents;
  sum.replaced_documents += chunk.replaced_documents;
}

int64_t count_repeated(std::vector<uint64_t>& hashes) {
  std::sort(hashes.begin(), hashes.end());
  const auto distinct = std::unique(hashes.begin(), hashes.end());
  return static_cast<int64_t>(hashes.end() - distinct);
}

}  // namespace

uint32_t CorpusStatistics::length_at(double share) const {
  if (lengths.empty()) return 0;
  return lengths[static_cast<size_t>(share * static_cast<double>(lengths.size() - 1))];
}

CorpusStatistics collect(const Sources& sources, const Tokenizer* tokenizer,
                         const StatisticsOptions& options, BadDocuments& bad) {
  CorpusStatistics sum;
  for (const auto& file : sources.files) {
    auto& [count, bytes] = sum.files[to_string(file.format)];
    ++count;
    bytes += file.bytes;
  }
  std::unique_ptr<TextEncoders> encoders;
  if (tokenizer) encoders = std::make_unique<TextEncoders>(*tokenizer, options.num_threads);
  std::vector<size_t> units(sources.units.size());
  std::iota(units.begin(), units.end(), size_t{0});
  ChunkReader::Context context{.sources = sources, .encoders = encoders.get(), .bad = bad};
  ChunkReader reader(context, units, {.documents = options.documents, .keep_hashes = true});
  std::vector<uint64_t> hashes;
  // Before the work, so that whoever shows a rate knows when it began.
  if (options.progress && !units.empty())
    options.progress(0, static_cast<int64_t>(sources.disk_bytes()));
  for (TokenizedCorpus chunk; reader.next(chunk); chunk = {}) {
    add(chunk, options, sum, hashes);
    if (options.progress) {
      options.progress(static_cast<int64_t>(reader.consumed()),
                       static_cast<int64_t>(sources.disk_bytes()));
    }
  }
  sum.bad_documents = bad.count();
  sum.duplicates = count_repeated(hashes);
  std::sort(sum.lengths.begin(), sum.lengths.end());
  return sum;
}

}  // namespace longhaul::data
