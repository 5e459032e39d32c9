#include "longhaul/data/stream_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "longhaul/base/file.h"
#include "longhaul/data/mixed_dataset.h"
#include "longhaul/data/prepare.h"
#include "tests/data/corpus_files.h"
#include "tests/support/log_capture.h"

namespace longhaul::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int kMarks = 301, kEndOfText = 256;

// Document i as a text from which it can be told, in whatever pieces its tokens are shown: its mark
// is a token.
std::string mark(int i) { return "<" + std::to_string(i) + ">"; }
std::string marked(int i) { return "a" + mark(i); }

const Tokenizer& tokenizer() {
  static const Tokenizer made = [] {
    std::vector<std::string> special = {"<|endoftext|>"};
    for (int i = 0; i < kMarks; ++i) special.push_back(mark(i));
    return bytes_tokenizer(special);
  }();
  return made;
}

std::vector<std::string> marked_texts(int count) {
  std::vector<std::string> texts;
  for (int i = 0; i < count; ++i) texts.push_back(marked(i));
  return texts;
}

StreamOptions small_chunks(bool shuffle = true, bool repeat = true) {
  return {.packing = {.shape = {.seq_len = 8},
                      .document_mask = false,
                      .shuffle = shuffle,
                      .seed = 7,
                      .repeat = repeat},
          .chunks = {.chunk_bytes = 100}};
}

std::unique_ptr<StreamDataset> stream(const std::string& paths, const StreamOptions& options) {
  auto bad = std::make_unique<BadDocuments>(options.chunks.documents.skip_bad);
  auto sources = list_sources(paths, options.chunks.documents, *bad);
  return std::make_unique<StreamDataset>(std::move(sources), tokenizer(), options, std::move(bad));
}

// The predicted tokens of so many rows, without the ends of documents, as text.
std::string labels_of(const Dataset& data, uint64_t first, uint64_t rows) {
  std::vector<int32_t> ids;
  for (uint64_t i = first; i < first + rows; ++i) {
    const Row row = data.row(i);
    for (const int32_t label : row.labels) {
      if (label != kIgnoredLabel && label != kEndOfText) ids.push_back(label);
    }
  }
  return tokenizer().decode(ids);
}

// How often each document's mark stands in the text.
std::map<std::string, int> marks_in(const std::string& text) {
  std::map<std::string, int> marks;
  for (size_t at = text.find('<'); at != std::string::npos; at = text.find('<', at + 1)) {
    ++marks[text.substr(at, text.find('>', at) + 1 - at)];
  }
  return marks;
}

// That a file of row counts lists.
size_t chunks_in(const std::filesystem::path& row_counts) {
  std::istringstream words(read_file(row_counts));
  size_t chunks = 0;
  for (std::string word; words >> word;) chunks += word == "chunk";
  return chunks;
}

class Stream : public ::testing::Test {
 protected:
  // 300 documents in files of all kinds.
  Stream() {
    const auto texts = marked_texts(300);
    const auto part = [&](int begin, int end) {
      return std::vector<std::string>(texts.begin() + begin, texts.begin() + end);
    };
    folder_.write("corpus/a.jsonl", jsonl(part(0, 100)));
    folder_.write("corpus/b.gz", gzip(jsonl(part(100, 200))));
    folder_.write("corpus/c.zst", zstd(jsonl(part(200, 250))));
    const auto rest = part(250, 290);
    write_parquet(folder_, "corpus/d.parquet", "text", strings({rest.begin(), rest.end()}), 16);
    for (int i = 290; i < 300; ++i) folder_.write("corpus/e" + std::to_string(i), marked(i));
  }

  std::string corpus() const { return (folder_.path() / "corpus").string(); }
  TemporaryFolder folder_;
};

TEST_F(Stream, OnePassHoldsEachDocumentOnce) {
  for (const bool shuffle : {false, true}) {
    const auto data = stream(corpus(), small_chunks(shuffle, /*repeat=*/false));
    EXPECT_EQ(data->num_rows(), std::nullopt);
    uint64_t rows = 0;
    while (data->has_row(rows)) ++rows;
    ASSERT_EQ(data->num_rows(), rows);
    EXPECT_FALSE(data->has_row(rows + 5));
    EXPECT_THROW(data->row(rows), Error);
    // The first token of a chunk is not predicted; it is no mark.
    const auto marks = marks_in(labels_of(*data, 0, rows));
    EXPECT_EQ(marks.size(), 300u);
    for (const auto& [mark, count] : marks) EXPECT_EQ(count, 1) << mark;
  }
}

TEST_F(Stream, OrderDependsOnSeedAndPassAlone) {
  const auto one = stream(corpus(), small_chunks());
  const uint64_t rows = one->rows_in_a_pass();
  const std::string first = labels_of(*one, 0, rows), second = labels_of(*one, rows, rows);
  EXPECT_NE(first, second);
  EXPECT_EQ(marks_in(first), marks_in(second));
  auto options = small_chunks();
  options.num_threads = 5;
  const auto other = stream(corpus(), options);
  EXPECT_EQ(labels_of(*other, 0, rows), first);
  EXPECT_EQ(other->rows_in_a_pass(), rows);
  options.packing.seed = 8;
  EXPECT_NE(labels_of(*stream(corpus(), options), 0, rows), first);
}

// From any row on, and back again, without what came before.
TEST_F(Stream, EachRowIsFoundAlone) {
  std::vector<Row> all;
  const auto data = stream(corpus(), small_chunks());
  const uint64_t count = 2 * data->rows_in_a_pass() + 20;
  for (uint64_t i = 0; i < count; ++i) all.push_back(data->row(i));
  for (const uint64_t start : {uint64_t{0}, uint64_t{3}, count / 3, count / 2, count - 2}) {
    const auto fresh = stream(corpus(), small_chunks());
    EXPECT_EQ(fresh->row(start).input_ids, all[start].input_ids) << start;
    EXPECT_EQ(fresh->row(start + 1).labels, all[start + 1].labels) << start;
    EXPECT_EQ(fresh->row(0).input_ids, all[0].input_ids);
    EXPECT_EQ(data->row(start).input_ids, all[start].input_ids) << start;
  }
}

// With known counts nothing that lies before the position is opened.
TEST_F(Stream, KnownRowsAreNotReadAgain) {
  const auto counts = folder_.path() / "row_counts.txt";
  auto options = small_chunks(/*shuffle=*/false);
  options.row_counts = {counts, true};
  std::vector<int32_t> expected;
  uint64_t last = 0;
  {
    const auto data = stream(corpus(), options);
    last = data->rows_in_a_pass() - 1;
    expected = data->row(last).input_ids;
  }
  const auto sources_bytes = std::filesystem::file_size(folder_.path() / "corpus/b.gz");
  folder_.write("corpus/b.gz", std::string(sources_bytes, 'x'));  // same size, other text
  options.row_counts->write = false;
  EXPECT_EQ(stream(corpus(), options)->row(last).input_ids, expected);
  // Of other data they are not used.
  auto other = options, without = options;
  other.packing.shape.seq_len = without.packing.shape.seq_len = 9;
  without.row_counts.reset();
  EXPECT_EQ(stream(corpus(), other)->row(30).input_ids,
            stream(corpus(), without)->row(30).input_ids);
  // To leave out bad documents is the usual remedy for one; what was counted before is as it was.
  auto skipping = options;
  skipping.chunks.documents.skip_bad = true;
  EXPECT_EQ(stream(corpus(), skipping)->row(last).input_ids, expected);
  // A line that was cut counts as not there, and so does what follows it.
  std::ifstream in(counts);
  std::string text((std::istreambuf_iterator<char>(in)), {});
  folder_.write("row_counts.txt", text.substr(0, text.size() - 4));
  EXPECT_EQ(stream(corpus(), options)->row(last).input_ids, expected);
}

// Chunks behind the one that was asked for are read while their rows are not wanted yet.
TEST_F(Stream, ReadsAhead) {
  const auto counts = folder_.path() / "row_counts.txt";
  auto options = small_chunks(/*shuffle=*/false);
  options.row_counts = {counts, true};
  const auto data = stream(corpus(), options);
  data->row(0);
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (chunks_in(counts) < 3 && std::chrono::steady_clock::now() < limit) {
    std::this_thread::yield();
  }
  EXPECT_GE(chunks_in(counts), 3u);
}

TEST_F(Stream, DataThatChangedUnderTheRunAreAnError) {
  const auto counts = folder_.path() / "row_counts.txt";
  auto options = small_chunks(/*shuffle=*/false);
  options.row_counts = {counts, true};
  stream(corpus(), options)->rows_in_a_pass();
  const auto path = folder_.path() / "corpus/a.jsonl";
  const auto bytes = std::filesystem::file_size(path);
  folder_.write("corpus/a.jsonl", jsonl({std::string(bytes - 27, 'y')}) + "\n\n\n");
  std::filesystem::resize_file(path, bytes);
  EXPECT_THAT(user_error([&] { stream(corpus(), options)->row(0); }),
              HasSubstr("the files have changed under the run"));
}

// The ledger of the position: 64 documents in files of several kinds and chunks, document i being
// five times the same letter; six steps on 4 ranks, then on 2, then on 8, each time a new process.
// The first rank keeps the row counts.
class StreamLedger : public ::testing::Test {
 protected:
  static constexpr uint64_t kBatch = 8;

  static char letter(int document) {
    const char sign = static_cast<char>('0' + document);
    return sign == '\\' ? '~' : sign;  // no escapes
  }

  StreamLedger() {
    const auto texts = [](int begin, int end) {
      std::vector<std::string> texts;
      for (int i = begin; i < end; ++i) texts.push_back(std::string(5, letter(i)));
      return texts;
    };
    folder_.write("corpus/a", jsonl(texts(0, 13)));
    folder_.write("corpus/b", gzip(jsonl(texts(13, 26))));
    folder_.write("corpus/c", zstd(jsonl(texts(26, 39))));
    const auto cells = texts(39, 52);
    write_parquet(folder_, "corpus/d", "text", strings({cells.begin(), cells.end()}), 4);
    folder_.write("corpus/e", jsonl(texts(52, 64)));
    path_ = (folder_.path() / "corpus").string();
  }

  static StreamOptions options(bool shuffle) {
    auto options = small_chunks(shuffle);
    options.packing.shape.seq_len = 6;
    options.chunks.chunk_bytes = 30;
    return options;
  }

  // The labels of the rows of six steps, by the row's number.
  void run(uint64_t num_ranks, StreamOptions options, bool with_counts, uint64_t& position,
           std::vector<std::string>& consumed) const {
    std::vector<std::unique_ptr<StreamDataset>> ranks;
    for (uint64_t rank = 0; rank < num_ranks; ++rank) {
      options.num_threads = static_cast<int>(rank % 3) + 1;
      if (with_counts) options.row_counts = {folder_.path() / "row_counts.txt", rank == 0};
      ranks.push_back(stream(path_, options));
    }
    for (int step = 0; step < 6; ++step, position += kBatch) {
      for (uint64_t rank = 0; rank < num_ranks; ++rank) {
        const RowRange range = rows_of_rank({position, kBatch, rank, num_ranks});
        for (uint64_t i = range.first; i < range.first + range.count; ++i) {
          ASSERT_EQ(i, consumed.size());
          consumed.push_back(labels_of(*ranks[rank], i, 1));
        }
      }
    }
  }

  // Each document once in each pass; of a chunk's first token nothing is predicted.
  void expect_whole_passes(const std::vector<std::string>& consumed, uint64_t rows,
                           size_t chunks) const {
    for (uint64_t begin = 0; begin + rows <= consumed.size(); begin += rows) {
      std::string pass;
      for (uint64_t i = begin; i < begin + rows; ++i) pass += consumed[i];
      size_t missing = 0;
      for (int i = 0; i < 64; ++i) {
        const auto count = std::count(pass.begin(), pass.end(), letter(i));
        EXPECT_GE(count, 4) << letter(i) << " in the pass from row " << begin;
        EXPECT_LE(count, 5) << letter(i) << " in the pass from row " << begin;
        missing += count == 4;
      }
      EXPECT_LE(missing, chunks);
    }
  }

  TemporaryFolder folder_;
  std::string path_;
};

TEST_F(StreamLedger, HasNoGapAndNoRepeat) {
  for (const bool shuffle : {false, true}) {
    for (const bool with_counts : {false, true}) {
      std::filesystem::remove(folder_.path() / "row_counts.txt");
      std::vector<std::string> consumed;
      uint64_t position = 0;
      for (const uint64_t num_ranks : {4, 2, 8}) {
        run(num_ranks, options(shuffle), with_counts, position, consumed);
      }
      auto counting = options(shuffle);
      counting.row_counts = {folder_.path() / "all_counts.txt", true};
      uint64_t rows = 0;
      {
        const auto data = stream(path_, counting);
        rows = data->rows_in_a_pass();
      }
      ASSERT_GE(consumed.size(), 2 * rows);
      const size_t chunks = chunks_in(counting.row_counts->path);
      EXPECT_GE(chunks, 10u);
      expect_whole_passes(consumed, rows, chunks);
    }
  }
}

TEST_F(Stream, TheSplitIsDisjointAndWhole) {
  auto options = small_chunks(true, false);
  options.chunks.split = {.fraction = 0.2};
  const auto training = stream(corpus(), options);
  options.chunks.split.held_out = true;
  const auto held_out = stream(corpus(), options);
  const auto marks = [](const Dataset& data) {
    return marks_in(labels_of(data, 0, data.rows_in_a_pass()));
  };
  auto of_training = marks(*training), of_held_out = marks(*held_out);
  EXPECT_GT(of_held_out.size(), 30u);
  EXPECT_LT(of_held_out.size(), 90u);
  const size_t both = of_training.size() + of_held_out.size();
  of_training.merge(of_held_out);
  EXPECT_EQ(of_training.size(), 300u);
  EXPECT_EQ(both, 300u);
}

TEST_F(Stream, BestFitKeepsDocumentsWhole) {
  auto options = small_chunks(true, false);
  options.packing.best_fit = options.packing.document_mask = true;
  options.packing.shape.seq_len = 30;
  const auto data = stream(corpus(), options);
  EXPECT_EQ(marks_in(labels_of(*data, 0, data->rows_in_a_pass())).size(), 300u);
}

TEST_F(Stream, BadDocumentsAreLeftOutOrAnError) {
  folder_.write("corpus/f.jsonl", "{\"text\": 1}\n" + jsonl({marked(300)}));
  auto options = small_chunks(true, false);
  EXPECT_THAT(user_error([&] {
                const auto data = stream(corpus(), options);
                data->rows_in_a_pass();
              }),
              HasSubstr("f.jsonl:1: the field \"text\" is a number"));
  options.chunks.documents.skip_bad = true;
  const auto data = stream(corpus(), options);
  EXPECT_EQ(marks_in(labels_of(*data, 0, data->rows_in_a_pass())).size(), 301u);
}

// What validation reads again and again is read once.
TEST_F(Stream, RowsThatAreKeptAreNotReadAgain) {
  auto options = small_chunks(true, false);
  options.keep_bytes = 1 << 20;
  const auto data = stream(corpus(), options);
  const uint64_t rows = data->rows_in_a_pass();
  const std::string first = labels_of(*data, 0, rows);
  std::filesystem::remove_all(corpus());
  EXPECT_EQ(labels_of(*data, 0, rows), first);
  EXPECT_FALSE(data->has_row(rows));
}

TEST_F(Stream, ReadingCanBeCalledOff) {
  BadDocuments bad(false);
  const auto sources = list_sources(corpus(), {}, bad);
  TextEncoders encoders(tokenizer(), 1);
  std::stop_source stop;
  ChunkReader::Context context{
      .sources = sources, .encoders = &encoders, .bad = bad, .stop = stop.get_token()};
  ChunkReader reader(context, {0}, {.chunk_bytes = 100});
  TokenizedCorpus corpus;
  EXPECT_TRUE(reader.next(corpus));
  EXPECT_GT(context.bytes_read.load(), 0u);
  stop.request_stop();
  EXPECT_THROW(reader.next(corpus), Stopped);
}

TEST_F(Stream, BadDocumentsOfAPassAreCounted) {
  folder_.write("corpus/f.jsonl", "{\"text\": 1}\n{}\n" + jsonl({marked(300)}));
  auto options = small_chunks(true, true);
  options.chunks.documents.skip_bad = true;
  test::LogCapture log;
  const auto data = stream(corpus(), options);
  data->row(2 * data->rows_in_a_pass() + 1);
  EXPECT_THAT(log.text(), HasSubstr("2 bad documents were left out"));
}

// A file that cannot be read at all is left out of each pass.
TEST_F(Stream, FilesThatAreBadAreCountedAndListedOnce) {
  folder_.write("corpus/broken.parquet", "PAR1 and no more");
  folder_.write("corpus/f.jsonl", "{\"text\": 1}\n" + jsonl({marked(300)}));
  auto options = small_chunks(/*shuffle=*/false, /*repeat=*/false);
  options.chunks.documents.skip_bad = true;
  const uint64_t rows = stream(corpus(), options)->rows_in_a_pass();
  options.packing.repeat = true;
  const auto list = folder_.path() / "bad_documents.txt";
  auto bad = std::make_unique<BadDocuments>(true);
  bad->list_in(list);
  auto sources = list_sources(corpus(), options.chunks.documents, *bad);
  test::LogCapture log;
  const StreamDataset data(std::move(sources), tokenizer(), options, std::move(bad));
  for (uint64_t row = 0; row <= 2 * rows; ++row) data.row(row);
  const std::string told = "a pass through the data has been read; 2 bad documents were left out";
  const size_t first = log.text().find(told);
  ASSERT_NE(first, std::string::npos) << log.text();
  EXPECT_NE(log.text().find(told, first + 1), std::string::npos) << log.text();
  EXPECT_GE(data.bad_documents(), 3);
  const std::string text = read_file(list);
  EXPECT_THAT(text, AllOf(HasSubstr("broken.parquet: "), HasSubstr("f.jsonl:1: the field")));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2) << text;
}

TEST_F(Stream, BadDocumentsThatAreReadAgainCountOnceInAPass) {
  folder_.write("corpus/0.jsonl", "{\"text\": 1}\n{}\n" + jsonl({marked(300)}));
  auto options = small_chunks(/*shuffle=*/false);
  options.chunks.documents.skip_bad = true;
  test::LogCapture log;
  const auto data = stream(corpus(), options);
  for (uint64_t row = 0; row < 40; ++row) data->row(row);
  data->row(0);  // long dropped
  data->row(data->rows_in_a_pass() + 1);
  EXPECT_THAT(log.text(), HasSubstr("2 bad documents were left out"));
}

// An end, and no hang.
TEST(StreamEnd, OfDataWithoutText) {
  const TemporaryFolder folder;
  folder.write("corpus/a", "{\"text\": \"\"}\n");
  folder.write("corpus/b", "");
  for (const bool repeat : {false, true}) {
    const auto data = stream((folder.path() / "corpus").string(), small_chunks(true, repeat));
    EXPECT_THAT(user_error([&] { data->row(0); }), HasSubstr("no document to learn from"));
    EXPECT_THAT(user_error([&] { data->row(1); }), HasSubstr("no document to learn from"));
  }
}

// Prepared tokens and the text they were made from hold the same documents.
TEST_F(Stream, OfPreparedTokens) {
  const auto tokens = folder_.path() / "tokens";
  prepare(corpus(), tokenizer(), tokens, {});
  const auto data = stream(tokens.string(), small_chunks(true, false));
  EXPECT_EQ(marks_in(labels_of(*data, 0, data->rows_in_a_pass())).size(), 300u);
  const std::string labels = labels_of(*data, 0, 1);
  EXPECT_EQ(data->label_bytes(data->row(0)), std::count(labels.begin(), labels.end(), 'a'));
}

TEST_F(Stream, InAMixture) {
  std::vector<std::unique_ptr<Dataset>> members;
  members.push_back(stream(corpus(), small_chunks(true, false)));
  members.push_back(stream((folder_.path() / "corpus/e*").string(), small_chunks(true, false)));
  const MixedDataset data(std::move(members), {1, 1});
  uint64_t rows = 0;
  while (data.has_row(rows)) data.row(rows++);
  ASSERT_TRUE(data.num_rows().has_value());
  EXPECT_EQ(*data.num_rows(), rows);
  EXPECT_GT(rows, 5u);
}

}  // namespace
}  // namespace longhaul::data
