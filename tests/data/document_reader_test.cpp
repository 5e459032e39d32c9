#include "longhaul/data/document_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "longhaul/base/file.h"
#include "longhaul/data/jsonl.h"
#include "longhaul/data/parquet.h"
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
  arrow::StringViewBuilder views;  // short ones lie in the view, long ones elsewhere
  for (const auto& text : texts) ASSERT_TRUE(views.Append(text).ok());
  EXPECT_EQ(read_texts(write_parquet(folder, "views", "text", views.Finish().ValueOrDie(), 64,
                                     /*keep_types=*/true)),
            texts);
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
  EXPECT_EQ(asked, 11);  // the first one also to be remembered
  EXPECT_THAT(log.text(), AllOf(HasSubstr("row 11: no text: left out; further ones are only"),
                                HasSubstr("100 bad documents are left out so far"),
                                HasSubstr("1,000 bad documents are left out so far")));
  BadDocuments few(true, 3);
  for (int i = 0; i < 2; ++i) few.add([&] { return "a:" + std::to_string(i); }, "no text");
  EXPECT_THAT(user_error([&] { few.add([] { return "a:2"; }, "no text"); }),
              HasSubstr("the first 3 documents are all bad (a:0: no text)"));
}

// It would take many times its size in memory. One byte more than is allowed, and a lot more.
TEST(Documents, OfALineThatIsTooLongAreBad) {
  const TemporaryFolder folder;
  test::LogCapture log;
  const size_t frame = jsonl({""}).size() - 1;  // without the line's end
  const std::string over(kLongestLine + 1 - frame, 'x'), far_over(kLongestLine + (4 << 20), 'x');
  const auto path = folder.write("rows", jsonl({"before", over, "between", far_over, "after"}));
  BadDocuments bad(true);
  EXPECT_THAT(read_texts(path, {}, bad), ElementsAre("before", "between", "after"));
  EXPECT_EQ(bad.count(), 2);
  EXPECT_THAT(log.text(),
              AllOf(HasSubstr("/rows:2: the line is longer than 33554432 bytes: left out"),
                    HasSubstr("/rows:4: the line is longer than")));
}

// Every bad row is to be found again, at no cost of time.
TEST(BadDocuments, AreListedByFileAndRowOrByte) {
  const TemporaryFolder folder;
  std::string content = "{\"text\": 1}\n" + jsonl(numbered(2000, 10'000));  // several units
  const size_t first_byte = content.size();
  for (int i = 0; i < 20; ++i) content += "{\"text\": []}\n";
  const auto path = folder.write("rows", content);
  const auto list = folder.path() / "list.txt";
  BadDocuments bad(true);
  bad.list_in(list);
  // The last unit first: its rows are told by number, and so it is known.
  const auto sources = list_sources(path, {}, bad);
  const DocumentOptions options;
  Document document;
  const auto read = [&](const Unit& unit) {
    const auto reader = open_documents(sources.files[0], unit, options, bad);
    while (reader->next(document)) {
    }
  };
  read(sources.units.back());
  read(sources.units.back());
  read(sources.units.front());
  bad.end_list();
  read(sources.units.front());
  EXPECT_EQ(bad.count(), 42);
  std::istringstream lines(read_file(list));
  Texts listed;
  for (std::string line; std::getline(lines, line);) listed.push_back(line);
  ASSERT_EQ(listed.size(), 41u);
  const std::string why = ": the field \"text\" is an array, expected a string";
  EXPECT_EQ(listed[0], path + ":2002" + why);
  EXPECT_EQ(listed[19], path + ":2021" + why);
  EXPECT_EQ(listed[20], path + ", byte " + std::to_string(first_byte) + why);
  EXPECT_EQ(listed[21], path + ", byte " + std::to_string(first_byte + 13) + why);
  EXPECT_THAT(listed[40], HasSubstr("/rows:1: the field \"text\" is a number"));
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
  // What comes out of damaged data may be rows that are none, before the checksum tells.
  EXPECT_GE(read_skipping(folder.write("damaged", damaged)).count, 1);
  EXPECT_EQ(read_skipping(folder.write("text", gzip("a long text").substr(0, 20))).count, 1);
}

// Bytes that do not compress, so that they make several blocks.
std::string noise(size_t bytes) {
  std::string text;
  for (uint64_t state = 1; text.size() < bytes;) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    text.push_back(static_cast<char>('0' + (state >> 33) % 64));
    if (text.back() == '\\') text.back() = '~';
  }
  return text;
}

// What a call of the library had made of the data before it met the damage is not lost.
TEST(Documents, BeforeTheDamageInZstandardAreTaken) {
  const TemporaryFolder folder;
  Texts texts;
  for (int i = 0; i < 40; ++i) texts.push_back(std::to_string(i) + noise(10'000));
  const std::string first = zstd(jsonl(texts)), second = zstd(jsonl({"lost"}));
  std::string damaged = first + second;
  damaged[first.size()] ^= 1;  // no frame begins so
  const auto skipped = read_skipping(folder.write("rows", damaged));
  EXPECT_EQ(skipped.texts, texts);
  EXPECT_EQ(skipped.count, 1);
  EXPECT_THAT(skipped.error, HasSubstr("the Zstandard data are damaged"));
}

TEST(Documents, OfUnusualCompressedFiles) {
  const TemporaryFolder folder;
  const std::string rows = jsonl({"a", "b"});
  EXPECT_THAT(read_texts(folder.write("zeros", gzip(rows) + std::string(1000, '\0'))),
              ElementsAre("a", "b"));
  EXPECT_THAT(read_texts(folder.write("between", gzip(rows) + std::string(3, '\0') + gzip(rows))),
              ElementsAre("a", "b", "a", "b"));
  const std::string skippable("\x51\x2A\x4D\x18\x02\0\0\0xy", 10);
  EXPECT_THAT(read_texts(folder.write("pzstd", skippable + zstd(rows))), ElementsAre("a", "b"));
  // As `zstd --long=30`.
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_windowLog, 30);
  std::string wide(ZSTD_compressBound(rows.size()), '\0');
  ZSTD_inBuffer in = {rows.data(), rows.size(), 0};
  ZSTD_outBuffer out = {wide.data(), wide.size(), 0};
  EXPECT_FALSE(ZSTD_isError(ZSTD_compressStream2(context, &out, &in, ZSTD_e_flush)));
  EXPECT_EQ(ZSTD_compressStream2(context, &out, &in, ZSTD_e_end), 0u);
  ZSTD_freeCCtx(context);
  EXPECT_THAT(read_texts(folder.write("long", wide.substr(0, out.pos))), ElementsAre("a", "b"));
}

// Text that is too long for one document: cut at ends of lines, or else between characters.
TEST(Documents, OfALongTextAreCut) {
  const TemporaryFolder folder;
  std::string lines;
  for (int i = 0; lines.size() <= kLongestText; ++i) {
    lines += std::to_string(i) + std::string(1000, 'x') + "\n";
  }
  const auto path = folder.write("lines", lines);
  const Texts texts = read_texts(path);
  ASSERT_EQ(texts.size(), 2u);
  EXPECT_LE(texts[0].size(), kLongestText);
  EXPECT_TRUE(texts[0].ends_with("x\n"));
  EXPECT_TRUE(texts[0] + texts[1] == lines);
  EXPECT_EQ(read_texts(folder.write("fits", lines.substr(0, kLongestText))).size(), 1u);
  // Places are those of the file.
  std::string broken = lines;
  broken[broken.size() - 2] = '\xFF';
  const auto count = std::count(lines.begin(), lines.end(), '\n');
  const auto skipped = read_skipping(folder.write("lines", broken));
  EXPECT_EQ(skipped.texts.size(), 1u);
  EXPECT_THAT(skipped.error, HasSubstr(fmt::format("/lines:{}: 0xFF is not UTF-8 here (byte {} of",
                                                   count, broken.size() - 2)));
  std::string characters;
  while (characters.size() <= kLongestText) characters += "\u4E2D\u6587\u00e9";
  // Of a byte order mark is neither the text nor its length.
  const std::string fits = lines.substr(0, kLongestText);
  EXPECT_TRUE(read_texts(folder.write("fits", "\xEF\xBB\xBF" + fits)) == Texts{fits});
  const auto marked = read_texts(folder.write("marked", "\xEF\xBB\xBF" + lines));
  EXPECT_TRUE(marked == texts);
  const Texts cut = read_texts(folder.write("characters", characters));
  ASSERT_EQ(cut.size(), 2u);
  EXPECT_TRUE(cut[0] + cut[1] == characters);
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

// What a row group holds behind the damage is lost with it; the other groups are not.
TEST(Documents, OfADamagedRowGroup) {
  const TemporaryFolder folder;
  const auto path = write_parquet(folder, "rows", "text",
                                  strings({"first", "second", "third", "fourth", "fifth"}), 2);
  std::string bytes = read_file(path);
  // The length before the text, where the column's dictionary has its first one.
  const size_t text = bytes.find("third");
  ASSERT_NE(text, std::string::npos);
  bytes.replace(text - 4, 4, "\xFF\xFF\xFF\x7F");
  const auto skipped = read_skipping(folder.write("rows", bytes));
  EXPECT_THAT(skipped.texts, ElementsAre("first", "second", "fifth"));
  EXPECT_EQ(skipped.count, 1);
  EXPECT_THAT(skipped.error,
              AllOf(HasSubstr("/rows:3: "), HasSubstr("rows 3 to 4 (a whole row group) cannot be "
                                                      "read")));
}

TEST(Documents, OfAColumnWithinAnother) {
  const TemporaryFolder folder;
  const auto meta = arrow::StructArray::Make({strings({"a"}), strings({"b"})},
                                             std::vector<std::string>{"text", "url"});
  const auto path = write_parquet(folder, "rows", "meta", meta.ValueOrDie(), 1);
  EXPECT_THAT(read_skipping(path, {.text_field = "meta.text"}).error,
              AllOf(HasSubstr("no column \"meta.text\""), HasSubstr("there are none")));
  EXPECT_THAT(read_skipping(path, {.text_field = "meta"}).error,
              HasSubstr("the column \"meta\" does not hold strings, but other columns"));
}

TEST(Documents, OfADictionary) {
  const TemporaryFolder folder;
  arrow::StringDictionaryBuilder builder;
  for (const char* text : {"a", "b", "a"}) ASSERT_TRUE(builder.Append(text).ok());
  ASSERT_TRUE(builder.AppendNull().ok());
  ASSERT_TRUE(builder.Append("b").ok());
  const auto path = write_parquet(folder, "rows", "text", builder.Finish().ValueOrDie(), 3,
                                  /*keep_types=*/true);
  const auto skipped = read_skipping(path);
  EXPECT_THAT(skipped.texts, ElementsAre("a", "b", "a", "b"));
  EXPECT_THAT(skipped.error, HasSubstr("/rows:4: the column \"text\" is null"));
}

// A disk that fails, or a file that is gone, is not a bad document: other ranks may have read it.
TEST(Documents, OfParquetThatTheDiskDoesNotDeliver) {
  const TemporaryFolder folder;
  const auto path = write_parquet(folder, "rows", "text", strings({"a", "b"}), 1);
  const DocumentOptions options{.skip_bad = true};
  BadDocuments bad(true);
  const auto sources = list_sources(path, options, bad);
  std::filesystem::remove(path);
  EXPECT_THROW(open_documents(sources.files[0], sources.units[1], options, bad), FileError);
  EXPECT_THROW(list_row_groups(path, "text"), FileError);
  EXPECT_EQ(bad.count(), 0);
}

TEST(Documents, OfTextThatIsNone) {
  const TemporaryFolder folder;
  const auto skipped = read_skipping(folder.write("a", "x\xFFy"));
  EXPECT_THAT(skipped.texts, IsEmpty());
  EXPECT_EQ(skipped.count, 1);
  EXPECT_THAT(skipped.error, HasSubstr("/a:1: 0xFF is not UTF-8"));
  test::LogCapture log;
  read_skipping(folder.write("b", "one\nx\xFFy"));
  EXPECT_THAT(log.text(), HasSubstr("/b:2: 0xFF is not UTF-8 here (byte 5 of the text): left out"));
}

// Editors put it before the text, of which it is no part; elsewhere it is a character.
TEST(Documents, OfTextBehindAByteOrderMark) {
  const TemporaryFolder folder;
  const std::string mark = "\xEF\xBB\xBF";
  EXPECT_THAT(read_texts(folder.write("a", mark + "one" + mark)), ElementsAre("one" + mark));
  EXPECT_THAT(read_texts(folder.write("b", gzip(mark + "one"))), ElementsAre("one"));
  EXPECT_THAT(user_error([&] { read_texts(folder.write("c", mark + "x\xFFy")); }),
              HasSubstr("/c:1: 0xFF is not UTF-8 here (byte 4 of"));
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
