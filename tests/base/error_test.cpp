#include "longhaul/base/error.h"

#include <gtest/gtest.h>

namespace longhaul {
namespace {

TEST(Error, CheckNamesPlaceConditionAndMessage) {
  try {
    LONGHAUL_CHECK(1 + 1 == 3, "sum of {} and {}", 1, 1);
    FAIL() << "no error was thrown";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("sum of 1 and 1"), std::string::npos) << text;
    EXPECT_NE(text.find("1 + 1 == 3"), std::string::npos) << text;
    EXPECT_NE(text.find("error_test.cpp:"), std::string::npos) << text;
  }
}

TEST(Error, NarrowThrowsOutsideTheRange) {
  EXPECT_EQ(narrow<int>(41L), 41);
  EXPECT_THROW(narrow<int>(1L << 40), Error);
  EXPECT_THROW(narrow<unsigned>(-1), Error);
  EXPECT_THROW(narrow<int>(0xFFFFFFFFu), Error);
}

TEST(Error, Division) {
  EXPECT_EQ(ceil_div(7, 4), 2);
  EXPECT_EQ(ceil_div(8, 4), 2);
  EXPECT_EQ(div_exact(8, 4, "heads"), 2);
  EXPECT_THROW(div_exact(7, 4, "heads"), Error);
}

}  // namespace
}  // namespace longhaul
