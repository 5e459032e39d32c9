#include "longhaul/data/document_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/data/jsonl.h"
#include "tests/data/corpus_files.h"
#include "tests/support/log_capture.h"

namespace longhaul::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using Texts = std::vector<std::string>;

Texts numbered(int count, size_t bytes = 10) {
  Texts texts;
  for (int i = 0; i < count; ++i) {
    texts.push_back(std::to_string(i) + std::string(static_cast<size_t>(i * 7) % bytes, 'x'));
  }
  return texts;
}

// What the reader leaves out of `content`, and what it says.
struct Skipped {
  Texts texts;
  int64_t count;
  std::string error;  // with skip_bad = false
};
Skipped read_skipping(const std::string& path, DocumentOptions options = {}) {
  options.skip_bad = true;
  BadDocuments bad(true);
  Skipped skipped;
  skipped.texts = read_texts(path, options, bad);
  skipped.count = bad.count();
  options.skip_bad = false;
  if (bad.count() > 0) skipped.error = user_error([&] { read_texts(path, options); });
  return skipped;
}

TEST(Documents, OfEachKindAreTheSame) {
  const TemporaryFolder folder;
  const Texts texts = numbered(300);
  const std::string rows = jsonl(texts);
  std::vector<std::optional<std::string>> cells(texts.begin(), texts.end());
  EXPECT_EQ(read_texts(folder.write("a", rows)), texts);
  EXPECT_EQ(read_texts(folder.write("b", gzip(rows))), texts);
  EXPECT_EQ(read_texts(folder.write("c", zstd(rows))), texts);
  EXPECT_EQ(read_texts(write_parquet(folder, "d", "text", strings(cells), 64)), texts);
  arrow::LargeStringBuilder large;
  ASSERT_TRUE(large.AppendValues({"a", "", "bc"}).ok());
  EXPECT_THAT(read_texts(write_parquet(folder, "e", "text", large.Finish().ValueOrDie(), 2)),
              ElementsAre("a", "", "bc"));
  EXPECT_THAT(read_texts(folder.write("f", gzip("one\ndocument"))), ElementsAre("one\ndocument"));
}

TEST(Documents, OfSeveralMembersAndFrames) {
  const TemporaryFolder folder;
  const std::string first = jsonl({"a"}), second = jsonl({"b", "c"});
  EXPECT_THAT(read_texts(folder.write("a", gzip(first) + gzip(second))),
              ElementsAre("a", "b", "c"));
  EXPECT_THAT(read_texts(folder.write("b", zstd(first) + zstd(second))),
              ElementsAre("a", "b", "c"));
}

// Lines belong to the unit in which they begin, wherever the borders fall.
TEST(Documents, OfAFileInUnits) {
  const TemporaryFolder folder;
  const Texts texts = numbered(40);
  const std::string content = jsonl(texts);
  const SourceFile file{.path = folder.write("a", content),
                        .bytes = content.size(),
                        .format = {.content = Content::kJsonl}};
  const DocumentOptions options;
  BadDocuments bad(false);
  for (const uint64_t size : {1, 2, 7, 26, 27, 28, 100, 1000, 100'000}) {
    Texts found;
    for (uint64_t begin = 0; begin < content.size(); begin += size) {
      const Unit unit{.begin = begin,
                      .end = std::min<uint64_t>(begin + size, content.size()),
                      .disk_bytes = size};
      const auto reader = open_documents(file, unit, options, bad);
      for (Document document; reader->next(document);) found.push_back(document.text);
    }
    EXPECT_EQ(found, texts) << size;
  }
}

TEST(Documents, LargeFilesAreCutIntoUnits) {
  const TemporaryFolder folder;
  const Texts texts = numbered(3000, 10'000);
  const auto path = folder.write("a", jsonl(texts));
  BadDocuments bad(false);
  EXPECT_GT(list_sources(path, {}, bad).units.size(), 2u);
  EXPECT_EQ(read_texts(path), texts);
}

TEST(Documents, BlanksAndEscapesInJsonl) {
  const TemporaryFolder folder;
  EXPECT_THAT(read_texts(folder.write("a",
                                      "\xEF\xBB\xBF{\"text\": \"a\\n\\u00e9\"}\r\n\n  \t\n"
                                      "{\"text\":\"\",\"n\":{}}\n{\"text\":\"last\"}")),
              ElementsAre("a\n\u00e9", "", "last"));
  EXPECT_THAT(read_texts(folder.write("b", "{\"body\": \"x\"}\n"), {.text_field = "body"}),
              ElementsAre("x"));
}

TEST(Documents, BadRowsOfJsonl) {
  const TemporaryFolder folder;
  const auto path = folder.write(
      "rows",
      "{\"text\": \"good\"}\n{\"text\": 3}\n{\"other\": \"x\"}\n{\"text\": \"\xFF\"}\n"
      "{\"text\": \"nul \\u0000\"}\n{\"text\": }\n\n{\"text\": null}\n{\"text\": \"good\"}\n");
  const auto skipped = read_skipping(path);
  EXPECT_THAT(skipped.texts, ElementsAre("good", "good"));
  EXPECT_EQ(skipped.count, 6);
  EXPECT_THAT(skipped.error, AllOf(HasSubstr("/rows:2: the field \"text\" is a number"),
                                   HasSubstr("training.bad_documents = \"skip\"")));
  const auto repaired = read_skipping(path, {.on_invalid = InvalidText::kReplace});
  EXPECT_THAT(repaired.texts, ElementsAre("good", "\uFFFD", "nul \uFFFD", "good"));
  EXPECT_EQ(repaired.count, 4);
}

TEST(Documents, BadRowsAreToldByFileAndRow) {
  const TemporaryFolder folder;
  Texts texts = numbered(2000, 10'000);  // several units
  std::string content = jsonl(texts) + "{\"text\": []}\n" + jsonl({"end"});
  const auto path = folder.write("rows", content);
  test::LogCapture log;
  const auto skipped = read_skipping(path);
  EXPECT_EQ(skipped.count, 1);
  EXPECT_EQ(skipped.texts.size(), 2001u);
  EXPECT_THAT(skipped.error, HasSubstr("/rows:2001: the field \"text\" is an array"));
  EXPECT_THAT(log.text(),
              HasSubstr("/rows:2001: the field \"text\" is an array, expected a string: "
                        "left out"));
}

// Where a row stands is looked up only while rows are told: it costs reading what is before it.
TEST(BadDocuments, ThatAreNotToldCostNothing) {
  test::LogCapture log;
  BadDocuments bad(true);
  int asked = 0;
  for (int i = 0; i < 2000; ++i) {
    bad.add([&] { return "row " + std::to_string(++asked); }, "no text");
  }
  EXPECT_EQ(bad.count(), 2000);
  EXPECT_EQ(asked, 10);
  EXPECT_THAT(log.text(), AllOf(HasSubstr("row 10: no text: left out; further ones are only"),
                                HasSubstr("100 bad documents are left out so far"),
                                HasSubstr("1,000 bad documents are left out so far")));
  BadDocuments few(true, 3);
  for (int i = 0; i < 2; ++i) few.add([] { return "x"; }, "no text");
  EXPECT_THAT(user_error([&] { few.add([] { return "a:3"; }, "no text"); }),
              AllOf(HasSubstr("a:3: no text"), HasSubstr("like the 2 documents before it")));
}

TEST(Documents, TruncatedCompressedFiles) {
  const TemporaryFolder folder;
  Texts texts;
  for (int i = 0; i < 2000; ++i) texts.push_back(std::to_string(i * 7919 % 10007));
  for (const bool with_zstd : {false, true}) {
    const std::string whole = with_zstd ? zstd(jsonl(texts)) : gzip(jsonl(texts));
    const auto skipped = read_skipping(folder.write("cut", whole.substr(0, whole.size() * 2 / 3)));
    EXPECT_EQ(skipped.count, 1);
    EXPECT_TRUE(with_zstd || skipped.texts.size() > 100u);  // one block of Zstandard is cut
    ASSERT_LT(skipped.texts.size(), texts.size());
    EXPECT_TRUE(std::equal(skipped.texts.begin(), skipped.texts.end(), texts.begin()));
    EXPECT_THAT(skipped.error, AllOf(HasSubstr("/cut:"), HasSubstr("truncated")));
    const auto only_end = read_skipping(folder.write("cut", whole.substr(0, whole.size() - 3)));
    EXPECT_EQ(only_end.count, 1);
  }
  std::string damaged = gzip(jsonl(texts));
  damaged[damaged.size() / 2] ^= 0x55;
  EXPECT_EQ(read_skipping(folder.write("damaged", damaged)).count, 1);
  EXPECT_EQ(read_skipping(folder.write("text", gzip("a long text").substr(0, 20))).count, 1);
}

TEST(Documents, BadParquet) {
  const TemporaryFolder folder;
  const auto path =
      write_parquet(folder, "rows", "text", strings({"a", std::nullopt, "b\xFF", "c", "d"}), 2);
  const auto skipped = read_skipping(path);
  EXPECT_THAT(skipped.texts, ElementsAre("a", "c", "d"));
  EXPECT_EQ(skipped.count, 2);
  EXPECT_THAT(skipped.error, HasSubstr("/rows:2: the column \"text\" is null"));
  EXPECT_THAT(read_skipping(path, {.text_field = "body"}).error,
              AllOf(HasSubstr("no column \"body\""), HasSubstr("there are text")));
  arrow::Int64Builder numbers;
  ASSERT_TRUE(numbers.AppendValues({1, 2}).ok());
  const auto wrong = write_parquet(folder, "wrong", "text", numbers.Finish().ValueOrDie(), 2);
  EXPECT_THAT(read_skipping(wrong).error, HasSubstr("does not hold strings, but INT64"));
  std::ifstream in(path, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  const auto cut = read_skipping(folder.write("cut", whole.substr(0, whole.size() - 9)));
  EXPECT_EQ(cut.count, 1);
  EXPECT_THAT(cut.texts, IsEmpty());
  EXPECT_THAT(cut.error, AllOf(HasSubstr("/cut: "), HasSubstr("Parquet")));
}

TEST(Documents, OfTextThatIsNone) {
  const TemporaryFolder folder;
  const auto skipped = read_skipping(folder.write("a", "x\xFFy"));
  EXPECT_THAT(skipped.texts, IsEmpty());
  EXPECT_EQ(skipped.count, 1);
  EXPECT_THAT(skipped.error, HasSubstr("/a:1: 0xFF is not UTF-8"));
}

TEST(Split, IsByTextAndDisjoint) {
  const Split training{.fraction = 0.25}, held_out{.fraction = 0.25, .held_out = true};
  int held = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    const uint64_t hash = i * 0x9E3779B97F4A7C15u;
    EXPECT_NE(training.takes(hash), held_out.takes(hash));
    held += held_out.takes(hash);
  }
  EXPECT_NEAR(held, 250, 30);
  EXPECT_TRUE(Split{}.takes(0));
}

}  // namespace
}  // namespace longhaul::data
