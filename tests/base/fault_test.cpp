#include "longhaul/base/fault.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include "longhaul/base/file.h"
#include "tests/support/temp_folder.h"

namespace longhaul {
namespace {

using test::error_of;
using ::testing::HasSubstr;

class Fault : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!fault::kCompiledIn) GTEST_SKIP() << "built with LONGHAUL_FAULTS=OFF";
  }
};

TEST_F(Fault, HitsTheNthVisitOfItsPlaceOnly) {
  const fault::Armed armed("test.place:3:throw");
  fault::at("test.place");
  fault::at("test.other");
  fault::at("test.place");
  EXPECT_THROW(fault::at("test.place"), fault::Injected);
  fault::at("test.place");
}

TEST_F(Fault, IsGoneWithTheObject) {
  { const fault::Armed armed("test.place:throw"); }
  fault::at("test.place");
  EXPECT_EQ(fault::errno_at("test.place"), 0);
}

TEST_F(Fault, FullDisk) {
  {
    const fault::Armed armed("test.place:enospc");
    EXPECT_EQ(fault::errno_at("test.place"), ENOSPC);
  }
  const fault::Armed armed("test.place:enospc");
  EXPECT_THAT(error_of<FileError>([] { fault::at("test.place"); }), HasSubstr("No space left"));
}

TEST_F(Fault, KillIsTheDefault) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const fault::Armed armed("test.place");
    fault::at("test.place");
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
}

TEST_F(Fault, SeveralAtOnce) {
  const fault::Armed armed("test.a:2:einval,test.b:throw,test.a:2:throw");
  EXPECT_EQ(fault::errno_at("test.a"), 0);
  EXPECT_THROW(fault::at("test.b"), fault::Injected);
  EXPECT_EQ(fault::errno_at("test.a"), EINVAL);
  EXPECT_EQ(fault::errno_at("test.a"), 0);
}

TEST_F(Fault, BadSpecifications) {
  EXPECT_THAT(error_of<UserError>([] { fault::Armed armed("test.a:explode"); }),
              HasSubstr("'explode'"));
  EXPECT_THAT(error_of<UserError>([] { fault::Armed armed("test.a:0"); }), HasSubstr("'0'"));
  EXPECT_THAT(error_of<UserError>([] { fault::Armed armed(":kill"); }), HasSubstr("no place"));
  EXPECT_THAT(error_of<UserError>([] { fault::Armed armed("test.a,"); }), HasSubstr("no place"));
}

TEST_F(Fault, APlaceThatDoesNotExistIsNamed) {
  EXPECT_THAT(error_of<UserError>([] { fault::Armed armed("checkpoint.manifets:1:kill"); }),
              HasSubstr("no place 'checkpoint.manifets', did you mean 'checkpoint.manifest'?"));
  const fault::Trace trace;
  EXPECT_THAT(error_of<Error>([] { fault::at("nowhere"); }),
              HasSubstr("'nowhere' is not in fault::kPlaces"));
}

TEST_F(Fault, ADelayTakesAsLongAsItSays) {
  const fault::Armed armed("test.place:delay-30");
  const auto start = std::chrono::steady_clock::now();
  fault::at("test.place");
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(30));
}

TEST_F(Fault, TraceListsVisits) {
  const fault::Trace trace;
  fault::at("test.a");
  fault::at("test.b");
  fault::at("test.a");
  EXPECT_THAT(trace.visits(), ::testing::ElementsAre("test.a:1", "test.b:1", "test.a:2"));
}

}  // namespace
}  // namespace longhaul
