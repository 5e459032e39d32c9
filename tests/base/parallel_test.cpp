#include "longhaul/base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "longhaul/base/quiet.h"

namespace longhaul {
namespace {

TEST(Parallel, EachTaskRunsOnce) {
  for (const size_t count : {0ul, 1ul, 2ul, 1000ul}) {
    std::vector<std::atomic<int>> runs(count);
    parallel_tasks(
        count, [&](size_t i) { ++runs[i]; }, 5);
    for (const auto& times : runs) EXPECT_EQ(times, 1);
  }
}

// Four tasks that wait for each other end only if four threads run them.
TEST(Parallel, TasksRunAtTheSameTime) {
  std::atomic<int> arrived{0};
  parallel_tasks(
      4,
      [&](size_t) {
        ++arrived;
        while (arrived < 4) std::this_thread::yield();
      },
      4);
  EXPECT_EQ(arrived, 4);
}

// Of several ranks that read the same files one tells what is wrong with them.
TEST(Parallel, ThreadsAreQuietWhereTheCallerIs) {
  for (const bool quiet : {false, true}) {
    const Quiet as_a_rank(quiet);
    std::atomic<int> alike{0};
    parallel_tasks(
        8, [&](size_t) { alike += is_quiet() == quiet; }, 4);
    EXPECT_EQ(alike, 8);
  }
}

TEST(Parallel, TheFirstErrorIsThrownAfterAllRan) {
  std::atomic<int> ran{0};
  try {
    parallel_tasks(
        50,
        [&](size_t i) {
          ++ran;
          if (i == 7 || i == 30) throw std::runtime_error("task " + std::to_string(i));
        },
        3);
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "task 7");
  }
  EXPECT_EQ(ran, 50);
}

}  // namespace
}  // namespace longhaul
