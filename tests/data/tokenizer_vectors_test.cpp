// What Hugging Face's `tokenizers` package makes of ten thousand texts in many scripts, with the
// component structure of four published families and with each component alone; and its sets of
// characters. make_tokenizer_vectors.py wrote the vectors and describes them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "longhaul/base/file.h"
#include "longhaul/data/regex.h"
#include "longhaul/data/tokenizer.h"
#include "longhaul/data/unicode.h"
#include "tests/support/source_folder.h"

namespace longhaul::data {
namespace {

using nlohmann::json;

std::string vector_file(const std::string& name) {
  return test::source_folder() + "/tests/data/vectors/" + name;
}

std::string unzip(const std::string& path) {
  const gzFile file = gzopen(path.c_str(), "rb");
  EXPECT_NE(file, nullptr) << path;
  std::string text;
  char buffer[1 << 16];
  for (int got; (got = gzread(file, buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  gzclose(file);
  return text;
}

std::string from_hex(const std::string& digits) {
  std::string bytes;
  for (size_t i = 0; i < digits.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

const std::vector<std::string>& texts() {
  static const std::vector<std::string> all = [] {
    std::vector<std::string> result;
    std::istringstream lines(unzip(vector_file("strings.jsonl.gz")));
    for (std::string line; std::getline(lines, line);) {
      const json row = json::parse(line);
      result.push_back(row.is_string() ? row.get<std::string>()
                                       : from_hex(row.at("hex").get<std::string>()));
    }
    return result;
  }();
  return all;
}

uint32_t checksum(const void* data, size_t bytes) {
  return static_cast<uint32_t>(
      crc32(0, static_cast<const unsigned char*>(data), static_cast<unsigned>(bytes)));
}

uint32_t checksum(const std::string& text) { return checksum(text.data(), text.size()); }

std::vector<uint32_t> read_checksums(const std::string& name) {
  const std::string bytes = read_file(vector_file(name));
  std::vector<uint32_t> sums(bytes.size() / 4);
  std::memcpy(sums.data(), bytes.data(), bytes.size());
  return sums;
}

// Compares the first texts with their checksums, which stand from `sums` on; reports a few.
void expect_same(const Tokenizer& tokenizer, size_t count, const uint32_t* sums,
                 const std::string& name) {
  Encoder encoder(tokenizer);
  int wrong = 0;
  for (size_t i = 0; i < count && wrong < 3; ++i) {
    std::vector<int32_t> ids;
    encoder.encode(texts()[i], ids);
    const bool same_ids = checksum(ids.data(), ids.size() * sizeof(int32_t)) == sums[2 * i];
    EXPECT_TRUE(same_ids) << name << ", text " << i << ": " << json(ids).dump() << " of "
                          << json(texts()[i]).dump(-1, ' ', true, json::error_handler_t::replace);
    const std::string decoded = tokenizer.decode(ids);
    const bool same_text = !same_ids || checksum(decoded) == sums[2 * i + 1];
    EXPECT_TRUE(same_text) << name << ", text " << i << " decodes to " << json(decoded).dump();
    wrong += !same_ids || !same_text;
  }
}

class Family : public testing::TestWithParam<const char*> {};

TEST_P(Family, TenThousandTextsAreReadAndWrittenAsThePackageDoes) {
  const std::string name = GetParam();
  const auto tokenizer = Tokenizer::load(vector_file("families/" + name + ".json"));
  const auto sums = read_checksums("families/" + name + ".crc");
  ASSERT_EQ(texts().size(), 10'000u);
  ASSERT_EQ(sums.size(), 20'000u);
  expect_same(tokenizer, texts().size(), sums.data(), name);
}

INSTANTIATE_TEST_SUITE_P(Tokenizer, Family,
                         testing::Values("gpt2", "llama3", "qwen2", "deepseek_v3"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Components, EachIsWhatThePackageHas) {
  const json files = json::parse(read_file(vector_file("components.json")));  // sorted by name
  const auto sums = read_checksums("components.crc");
  constexpr size_t kTexts = 1500;
  ASSERT_EQ(sums.size(), files.size() * 2 * kTexts);
  size_t index = 0;
  for (const auto& [name, file] : files.items()) {
    SCOPED_TRACE(name);
    const auto tokenizer = Tokenizer::parse(file.dump(), name);
    expect_same(tokenizer, kTexts, sums.data() + 2 * kTexts * index++, name);
  }
  EXPECT_GT(index, 60u);
}

// All code points that `pattern` matches, as ranges.
json matching(const std::string& pattern) {
  const Regex regex(pattern);
  RegexMatcher matcher(regex);
  json ranges = json::array();
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    append_utf8(text, c);
    if (!matcher.find(text, 0)) continue;
    if (!ranges.empty() && ranges.back()[1] == c - 1) {
      ranges.back()[1] = c;
    } else {
      ranges.push_back({c, c});
    }
  }
  return ranges;
}

const json& unicode_tables() {
  static const json tables = json::parse(read_file(vector_file("unicode.json")));
  return tables;
}

TEST(UnicodeTables, EverySetOfAPattern) {
  for (const auto& [pattern, expected] : unicode_tables().at("sets").items()) {
    // Unicode 16 moved U+1171E from Mn to Mc, and PCRE2 10.42 still counts it as Mn, too.
    if (pattern == "\\p{Mn}") continue;
    EXPECT_EQ(matching(pattern), expected) << pattern;
  }
}

TEST(UnicodeTables, SmallLetters) {
  const json& expected = unicode_tables().at("small");
  EXPECT_GT(expected.size(), 1400u);
  for (char32_t c = 128; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    append_utf8(text, c);
    ASSERT_EQ(lower_case(text),
              expected.value(fmt::format("{:x}", static_cast<uint32_t>(c)), text));
  }
}

// Every character with marks of several classes in front and behind, in blocks.
TEST(UnicodeTables, NormalForms) {
  const std::pair<const char*, NormalForm> forms[] = {{"NFC", NormalForm::kNfc},
                                                      {"NFD", NormalForm::kNfd},
                                                      {"NFKC", NormalForm::kNfkc},
                                                      {"NFKD", NormalForm::kNfkd}};
  const json& expected = unicode_tables().at("forms");
  for (char32_t block = 0; block < 0x30000; block += 0x1000) {
    std::string text;
    for (char32_t c = block; c < block + 0x1000; ++c) {
      if (c >= 0xD800 && c < 0xE000) continue;
      for (const char32_t mark : {0x334, 0x345, 0x300, 0x323, 0x3099}) {
        for (const char32_t each : {c, char32_t{'a'}, c, mark, mark, c}) append_utf8(text, each);
      }
    }
    for (const auto& [name, form] : forms) {
      EXPECT_EQ(checksum(normal_form(form, text)), expected.at(name)[block / 0x1000])
          << name << ", from U+" << fmt::format("{:04X}", static_cast<uint32_t>(block));
    }
  }
}

}  // namespace
}  // namespace longhaul::data
