#include "longhaul/data/file_format.h"

#include <gtest/gtest.h>

#include "tests/data/corpus_files.h"

namespace longhaul::data {
namespace {

TEST(FileFormat, IsToldByContentAndNotByName) {
  const TemporaryFolder folder;
  const std::string rows = jsonl({"a", "b"});
  const auto format_of = [&](const std::string& content) {
    return to_string(recognize(folder.write("file.txt.parquet", content)));
  };
  EXPECT_EQ(format_of(""), "text");
  EXPECT_EQ(format_of("Some text.\n{\"text\": \"quoted\"}\nMore.\n"), "text");
  EXPECT_EQ(format_of("{\n  \"pretty\": 1,\n  \"json\": {}\n}\n"), "text");
  EXPECT_EQ(format_of("{ return 1; }\n"), "text");
  EXPECT_EQ(format_of(rows), "JSONL");
  EXPECT_EQ(format_of("\n\n" + rows), "JSONL");
  EXPECT_EQ(format_of("\xEF\xBB\xBF{}"), "JSONL");
  EXPECT_EQ(format_of("not json\n" + rows + rows), "JSONL");  // one broken row
  // Damaged rows are rows: their reader says so, and nobody learns them as text.
  EXPECT_EQ(format_of("{\"text\": \"cut he"), "JSONL");
  EXPECT_EQ(format_of("{\"text\": \"a\"\n{\"text\": \"b\"}\n"), "JSONL");
  EXPECT_EQ(format_of("not json\n{\"text\": \"b\"}\n"), "JSONL");
  EXPECT_EQ(format_of("{\"text\": \"" + std::string(200'000, 'x')), "JSONL");
  EXPECT_EQ(format_of(gzip(rows)), "JSONL, gzip");
  EXPECT_EQ(format_of(gzip("plain")), "text, gzip");
  EXPECT_EQ(format_of(zstd(rows)), "JSONL, Zstandard");
  EXPECT_EQ(format_of(gzip(rows).substr(0, 12)), "text, gzip");  // truncated before any text
  const auto parquet = write_parquet(folder, "x.jsonl", "text", strings({"a"}), 1);
  EXPECT_EQ(to_string(recognize(parquet)), "Parquet");
}

TEST(FileFormat, AMissingFileIsNamed) {
  EXPECT_NE(user_error([] { recognize("/no/where"); }).find("/no/where"), std::string::npos);
}

}  // namespace
}  // namespace longhaul::data
