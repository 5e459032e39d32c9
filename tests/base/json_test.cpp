#include "longhaul/base/json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/base/error.h"
#include "tests/support/temp_folder.h"

namespace longhaul {
namespace {

using test::error_of;
using ::testing::HasSubstr;

TEST(Json, ParsesNestedObjects) {
  const auto json = parse_json(R"({"a": {"x": 1}, "b": [{"x": 2}, {"x": 3}], "x": 4})", "f");
  EXPECT_EQ(json["b"][1]["x"], 3);
  EXPECT_EQ(json["x"], 4);
}

TEST(Json, ErrorsNameFileAndLine) {
  const auto parse = [](const char* text) {
    return error_of<UserError>([&] { parse_json(text, "dir/f.json"); });
  };
  EXPECT_THAT(parse("{\n\"a\": 1,\n\"b\": }"), HasSubstr("dir/f.json:3: not valid JSON"));
  EXPECT_THAT(parse(""), HasSubstr("dir/f.json:1: not valid JSON"));
  EXPECT_THAT(parse("{\"a\": \"\xff\"}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(parse("{\"a\": 1e999}"), HasSubstr("out of range"));
}

TEST(Json, RepeatedKeysAreErrors) {
  const auto parse = [](const char* text) {
    return error_of<UserError>([&] { parse_json(text, "f"); });
  };
  EXPECT_THAT(parse(R"({"a": 1, "a": 2})"), HasSubstr("'a' stands twice"));
  EXPECT_THAT(parse(R"({"q": [{"k": 1}, {"k": 1, "j": 2, "k": 3}]})"), HasSubstr("'k' stands"));
}

}  // namespace
}  // namespace longhaul
