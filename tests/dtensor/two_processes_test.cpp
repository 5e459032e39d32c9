// Ranks that really are processes: a TCP store, gloo, and ends that nobody announced.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/support/program.h"

namespace longhaul {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A port that nobody listens at right now.
int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(socket, generic, length), 0);
  EXPECT_EQ(::getsockname(socket, generic, &length), 0);
  ::close(socket);
  return ntohs(address.sin_port);
}

struct Peer {
  std::string what;
  int rank, port;
  int timeout_ms = 30'000;
  int size = 2;
  std::string job = "";

  std::vector<std::string> words() const {
    return {what,
            std::to_string(rank),
            std::to_string(size),
            std::to_string(port),
            std::to_string(timeout_ms),
            job};
  }
};

TEST(TwoProcesses, ExchangeData) {
  const int port = free_port();
  test::Program first(Peer{"exchange", 0, port}.words(), {}, LONGHAUL_DTENSOR_PEER);
  test::Program second(Peer{"exchange", 1, port}.words(), {}, LONGHAUL_DTENSOR_PEER);
  const auto of_0 = first.wait(), of_1 = second.wait();
  EXPECT_EQ(of_0.status, 0) << of_0.err;
  EXPECT_EQ(of_1.status, 0) << of_1.err;
  EXPECT_EQ(of_0.out, "gathered: 1 2\naverage: 0.5 0.5\nreceived: 10\n");
  EXPECT_EQ(of_1.out, "gathered: 1 2\naverage: 0.5 0.5\nreceived: 1 11 11\n");
}

TEST(TwoProcesses, OneThatLeftIsMissed) {
  const int port = free_port();
  test::Program stays(Peer{"exchange", 0, port}.words(), {}, LONGHAUL_DTENSOR_PEER);
  test::Program leaves(Peer{"leave", 1, port}.words(), {}, LONGHAUL_DTENSOR_PEER);
  const auto result = stays.wait();
  EXPECT_EQ(leaves.wait().status, 0);
  EXPECT_EQ(result.status, 1) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("rank 0: all_gather #1 on axis dp (ranks 0, 1) failed"),
                                HasSubstr("nothing was heard of rank 1")));
}

// Long before the time limit.
void expect_refused(const Peer& of_0, const Peer& of_1, const std::string& here,
                    const std::string& there) {
  test::Program first(of_0.words(), {}, LONGHAUL_DTENSOR_PEER);
  test::Program second(of_1.words(), {}, LONGHAUL_DTENSOR_PEER);
  const auto first_result = first.wait(), second_result = second.wait();
  EXPECT_EQ(first_result.status, 1) << first_result.err;
  EXPECT_EQ(second_result.status, 1) << second_result.err;
  EXPECT_THAT(second_result.out,
              HasSubstr(fmt::format("rank 1 has another job than rank 0: '{}' here, '{}' there",
                                    here, there)));
}

TEST(TwoProcesses, OtherJobsAreRefused) {
  const int port = free_port();
  expect_refused({.what = "exchange", .rank = 0, .port = port, .job = "lr = 1\nseed = 2"},
                 {.what = "exchange", .rank = 1, .port = port, .job = "lr = 1\nseed = 3"},
                 "seed = 3", "seed = 2");
  expect_refused({.what = "exchange", .rank = 0, .port = port, .job = "lr = 1"},
                 {.what = "exchange", .rank = 1, .port = port, .job = ""}, "", "lr = 1");
}

TEST(TwoProcesses, AnotherNumberOfRanksIsRefused) {
  const int port = free_port();
  expect_refused({.what = "exchange", .rank = 0, .port = port},
                 {.what = "exchange", .rank = 1, .port = port, .size = 3}, "ranks = 3",
                 "ranks = 2");
}

TEST(TwoProcesses, OneThatNeverStartsIsMissed) {
  test::Program alone(Peer{"exchange", 0, free_port(), 1000}.words(), {}, LONGHAUL_DTENSOR_PEER);
  const auto result = alone.wait();
  EXPECT_EQ(result.status, 1) << result.err;
  EXPECT_THAT(result.out, AllOf(HasSubstr("rank 0: the 2 ranks did not meet at 127.0.0.1:"),
                                HasSubstr("within 1000 ms"), HasSubstr("rank 1 did not come")));
}

}  // namespace
}  // namespace longhaul
