// Memory of a stream over two gigabytes of generated documents.
#include <gtest/gtest.h>

#include <fstream>

#include "longhaul/base/system.h"
#include "longhaul/data/stream_dataset.h"
#include "tests/data/corpus_files.h"

namespace longhaul::data {
namespace {

constexpr int64_t kCorpusBytes = int64_t{2} << 30;

// Lines of 2 to 10 kB of digits.
void write_documents(const std::filesystem::path& path, int64_t bytes) {
  std::ofstream out(path, std::ios::binary);
  uint64_t state = 1;
  for (int64_t written = 0; written < bytes;) {
    std::string text;
    const size_t length = 2000 + state % 8000;
    while (text.size() < length) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      text += std::to_string(state) + ' ';
    }
    const std::string line = jsonl({text});
    out << line;
    written += static_cast<int64_t>(line.size());
  }
}

TEST(StreamMemory, StaysFlatOverTwoGigabytes) {
  const TemporaryFolder folder;
  write_documents(folder.path() / "corpus.jsonl", kCorpusBytes);
  const auto tokenizer = bytes_tokenizer();
  auto bad = std::make_unique<BadDocuments>(false);
  auto sources = list_sources((folder.path() / "corpus.jsonl").string(), {}, *bad);
  const StreamDataset data(
      std::move(sources), tokenizer,
      {.packing = {.shape = {.seq_len = 4096}, .shuffle = true, .repeat = false}}, std::move(bad));
  // The window is full after a few chunks.
  uint64_t row = 0;
  while (row < 50'000) data.row(row++);
  const int64_t early = peak_memory_bytes();
  while (data.has_row(row)) data.row(row++);
  EXPECT_GT(row, 400'000u);
  EXPECT_LT(peak_memory_bytes() - early, int64_t{100} << 20);
  EXPECT_LT(peak_memory_bytes(), int64_t{1500} << 20);
}

}  // namespace
}  // namespace longhaul::data
