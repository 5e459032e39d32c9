#include "longhaul/base/background.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace longhaul {
namespace {

TEST(Background, RunsOneAfterAnother) {
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  Background background;
  for (int i = 0; i < 6; ++i) {
    const auto action = [&, i] {
      order.push_back(i);
      threads.push_back(std::this_thread::get_id());
    };
    i % 2 == 0 ? background.run(action) : background.run_here(action);
  }
  background.finish();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 5}));
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(threads[i] == std::this_thread::get_id(), i % 2 == 1) << i;
  }
}

TEST(Background, GoesOnBesideItsCaller) {
  std::atomic<bool> go = false;
  Background background;
  background.run([&] { go.wait(false); });
  go = true;  // would not be reached if run() waited
  go.notify_all();
  background.finish();
}

TEST(Background, TheFirstErrorEndsItAndIsThrown) {
  for (const bool here : {false, true}) {
    int ran = 0;
    Background background;
    const auto run = [&](const std::function<void()>& action) {
      here ? background.run_here(action) : background.run(action);
    };
    run([&] { ++ran; });
    run([] { throw std::runtime_error("first"); });
    run([&] { ++ran; });
    run([] { throw std::runtime_error("second"); });
    EXPECT_TRUE(background.failed());
    EXPECT_EQ(ran, 1);
    try {
      background.finish();
      FAIL() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "first");
    }
  }
}

TEST(Background, ItsEndWaits) {
  std::atomic<bool> ended = false;
  {
    Background background;
    background.run([&] {
      std::this_thread::yield();
      ended = true;
    });
  }
  EXPECT_TRUE(ended);
}

}  // namespace
}  // namespace longhaul
