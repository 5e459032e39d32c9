// Memory of a stream over gigabytes of generated documents.
#include <gtest/gtest.h>
#include <zlib.h>

#include <fstream>
#include <functional>

#include "longhaul/base/system.h"
#include "longhaul/data/stream_dataset.h"
#include "tests/data/corpus_files.h"

namespace longhaul::data {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

// Lines of 2 to 10 kB of digits, `bytes` in all, handed to `write`.
void make_documents(int64_t bytes, bool as_rows,
                    const std::function<void(const std::string&)>& write) {
  uint64_t state = 1;
  for (int64_t written = 0; written < bytes;) {
    std::string text;
    const size_t length = 2000 + state % 8000;
    while (text.size() < length) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      text += std::to_string(state) + ' ';
    }
    const std::string line = as_rows ? jsonl({text}) : text + "\n";
    write(line);
    written += static_cast<int64_t>(line.size());
  }
}

// Reads one pass and holds its memory against that of its first rows.
void expect_flat(const std::filesystem::path& path, uint64_t early_rows, uint64_t least_rows) {
  auto bad = std::make_unique<BadDocuments>(false);
  auto sources = list_sources(path.string(), {}, *bad);
  const StreamDataset data(
      std::move(sources), bytes_tokenizer(),
      {.packing = {.shape = {.seq_len = 4096}, .shuffle = true, .repeat = false}}, std::move(bad));
  // The window is full after a few chunks.
  uint64_t row = 0;
  while (row < early_rows) data.row(row++);
  const int64_t early = peak_memory_bytes();
  while (data.has_row(row)) data.row(row++);
  EXPECT_GT(row, least_rows);
  // Chunks differ in size; whatever stayed behind of each would be gigabytes of ids.
  EXPECT_LT(peak_memory_bytes() - early, int64_t{200} << 20);
  EXPECT_LT(peak_memory_bytes(), int64_t{1500} << 20);
}

TEST(StreamMemory, StaysFlatOverTwoGigabytes) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "corpus.jsonl";
  std::ofstream out(path, std::ios::binary);
  make_documents(2 * kGiB, true, [&](const std::string& line) { out << line; });
  out.close();
  expect_flat(path, 50'000, 400'000);
}

TEST(StreamMemory, StaysFlatOverACompressedFile) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "corpus.gz";
  const gzFile out = gzopen(path.c_str(), "wb1");
  make_documents(kGiB / 4, true, [&](const std::string& line) {
    gzwrite(out, line.data(), static_cast<unsigned>(line.size()));
  });
  ASSERT_EQ(gzclose(out), Z_OK);
  expect_flat(path, 30'000, 50'000);
}

TEST(StreamMemory, StaysFlatOverALongText) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "corpus.txt";
  std::ofstream out(path, std::ios::binary);
  make_documents(kGiB / 4, false, [&](const std::string& line) { out << line; });
  out.close();
  expect_flat(path, 30'000, 50'000);
}

}  // namespace
}  // namespace longhaul::data
