// Memory of a stream over gigabytes of generated documents. The peak is the process's and never
// falls, so each test is an entry of ctest by itself.
#include <gtest/gtest.h>
#include <zlib.h>

#include <fstream>
#include <functional>

#include "longhaul/base/system.h"
#include "longhaul/data/stream_dataset.h"
#include "tests/data/corpus_files.h"

namespace longhaul::data {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// Fills the window of a stream: what it read ahead, what it gives out, what it keeps.
constexpr int64_t kShort = 192 * kMiB;

uint64_t next(uint64_t& state) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 33;
}

// 64 words of a blank and ten letters.
const std::vector<std::string>& words() {
  static const auto made = [] {
    std::vector<std::string> words(64, " ");
    uint64_t state = 1;
    for (auto& word : words) {
      while (word.size() < 11) word += static_cast<char>('a' + next(state) % 26);
    }
    return words;
  }();
  return made;
}

// A token for each word.
Tokenizer words_tokenizer() {
  std::string text;
  for (const auto& word : words()) text += word + word;
  BpeTrainingOptions options;
  options.vocab_size = 1000;
  return Tokenizer::parse(train_bpe({text}, options).json, "words");
}

// Lines of 2 to 10 kB, `bytes` in all, handed to `write`.
void make_documents(int64_t bytes, bool as_rows,
                    const std::function<void(const std::string&)>& write) {
  uint64_t state = 1;
  for (int64_t written = 0; written < bytes;) {
    std::string text;
    const size_t length = 2000 + next(state) % 8000;
    while (text.size() < length) text += words()[next(state) % words().size()];
    const std::string line = as_rows ? jsonl({text}) : text + "\n";
    write(line);
    written += static_cast<int64_t>(line.size());
  }
}

using Make = std::function<void(const std::filesystem::path&, int64_t bytes)>;

// The rows of one pass over a file of so many bytes of text.
uint64_t read_pass(const Make& make, int64_t bytes) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "corpus";
  make(path, bytes);
  auto bad = std::make_unique<BadDocuments>(false);
  auto sources = list_sources(path.string(), {}, *bad);
  const StreamDataset data(
      std::move(sources), words_tokenizer(),
      {.packing = {.shape = {.seq_len = 4096}, .shuffle = true, .repeat = false}}, std::move(bad));
  uint64_t row = 0;
  while (data.has_row(row)) data.row(row++);
  return row;
}

// A long file takes the memory of a short one of its kind. The rest's text, or its ids alone (4
// bytes for 11 of text), would be 300 MiB and more.
void expect_flat(const Make& make, int64_t bytes) {
  read_pass(make, kShort);
  const int64_t of_short = peak_memory_bytes();
  EXPECT_LT(of_short, 1000 * kMiB);
  const uint64_t rows = read_pass(make, bytes);
  EXPECT_GT(rows, static_cast<uint64_t>(bytes / 12 / 4096));
  EXPECT_LT(peak_memory_bytes() - of_short, 200 * kMiB);
}

TEST(StreamMemory, StaysFlatOverTwoGigabytes) {
  const auto make = [](const std::filesystem::path& path, int64_t bytes) {
    std::ofstream out(path, std::ios::binary);
    make_documents(bytes, true, [&](const std::string& line) { out << line; });
  };
  expect_flat(make, 2048 * kMiB);
}

TEST(StreamMemory, StaysFlatOverACompressedFile) {
  const auto make = [](const std::filesystem::path& path, int64_t bytes) {
    const gzFile out = gzopen(path.c_str(), "wb1");
    make_documents(bytes, true, [&](const std::string& line) {
      gzwrite(out, line.data(), static_cast<unsigned>(line.size()));
    });
    ASSERT_EQ(gzclose(out), Z_OK);
  };
  expect_flat(make, 1024 * kMiB);
}

TEST(StreamMemory, StaysFlatOverALongText) {
  const auto make = [](const std::filesystem::path& path, int64_t bytes) {
    std::ofstream out(path, std::ios::binary);
    make_documents(bytes, false, [&](const std::string& line) { out << line; });
  };
  expect_flat(make, 1024 * kMiB);
}

}  // namespace
}  // namespace longhaul::data
