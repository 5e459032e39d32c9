#include "longhaul/base/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace longhaul {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

struct Screen {
  std::vector<std::string> written;
  double now = 0;

  ProgressLine::Output output(bool terminal, bool color) {
    return {.write = [this](const std::string& text) { written.push_back(text); },
            .seconds = [this] { return now; },
            .terminal = terminal,
            .color = color};
  }
};

TEST(Progress, PlainLinesEveryTenSecondsAndTheLast) {
  Screen screen;
  {
    ProgressLine line("reading", 4000, ProgressLine::Unit::kCount, screen.output(false, false));
    for (int second = 1; second <= 24; ++second) {
      screen.now = second;
      line.update(100 * second);
    }
    line.finish();
    line.update(5);
    line.finish();
  }
  EXPECT_THAT(screen.written, ElementsAre("reading: 1,000 of 4,000 (25%), 100/s, 30.0s left\n",
                                          "reading: 2,000 of 4,000 (50%), 100/s, 20.0s left\n",
                                          "reading: 2,400 in 24.0s, 100/s\n"));
}

TEST(Progress, ATerminalsLineIsRewrittenTenTimesASecond) {
  Screen screen;
  {
    ProgressLine line("reading", 0, ProgressLine::Unit::kBytes, screen.output(true, false));
    for (int i = 1; i <= 250; ++i) {
      screen.now = i * 0.001;
      line.update(1024 * i);
    }
  }
  ASSERT_EQ(screen.written.size(), 3u);
  EXPECT_THAT(screen.written[0], testing::StartsWith("\r"));
  EXPECT_THAT(screen.written[0], HasSubstr("reading: 100.0 KiB, 1000.0 KiB/s"));
  EXPECT_THAT(screen.written[0], Not(HasSubstr("\n")));
  EXPECT_EQ(screen.written[2], "\n");  // destroyed while a line was open
}

TEST(Progress, DetailInPlaceOfTheRate) {
  Screen screen;
  ProgressLine line("training", 8, ProgressLine::Unit::kCount, screen.output(true, false));
  screen.now = 1;
  line.update(2, "loss 4.5");
  EXPECT_THAT(screen.written, ElementsAre(HasSubstr("training: 2 of 8 (25%), loss 4.5")));
  EXPECT_THAT(screen.written[0], Not(HasSubstr("/s")));
}

TEST(Progress, AnErasedLineIsNotEndedTwice) {
  Screen screen;
  {
    ProgressLine line("training", 8, ProgressLine::Unit::kCount, screen.output(true, false));
    screen.now = 1;
    line.update(2);
    ProgressLine::erase_open_line();
  }
  EXPECT_EQ(screen.written.size(), 1u);
}

// What a crash handler calls. stderr is a pipe here, so that its bytes can be looked at.
TEST(Progress, AnOpenLineIsLeftSanely) {
  Screen screen;
  ProgressLine line("training", 8, ProgressLine::Unit::kCount, screen.output(true, false));
  screen.now = 1;
  line.update(2);
  testing::internal::CaptureStderr();
  ProgressLine::leave_terminal_sane();
  ProgressLine::leave_terminal_sane();  // nothing is open any more
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "\x1b[0m\n");
}

TEST(Progress, ColorOnlyWhereItIsAskedFor) {
  for (const bool color : {false, true}) {
    Screen screen;
    ProgressLine line("x", 10, ProgressLine::Unit::kCount, screen.output(true, color));
    screen.now = 1;
    line.update(1);
    EXPECT_EQ(screen.written[0].find("\x1b[2m") != std::string::npos, color);
  }
}

}  // namespace
}  // namespace longhaul
