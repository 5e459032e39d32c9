// What ranks leave of their collectives, and what it says when one of them did not come.
#include "longhaul/dtensor/flight_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "longhaul/dtensor/trace_report.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temp_folder.h"

namespace longhaul::test {
namespace {

using at::Tensor;
using dtensor::CollectiveError;
using dtensor::FlightRecorder;
using dtensor::Reduction;
using dtensor::Trace;
using dtensor::World;
using State = dtensor::TracedCollective::State;
using ::testing::AllOf;
using ::testing::HasSubstr;

FlightRecorder recorder_of(const World& world, const TempFolder& folder, size_t records = 100) {
  return {world, {.folder = folder.path() / "traces", .prefix = "rank_", .records = records}};
}

// Two ranks take two collectives along "dp"; of the third rank 1 hears nothing.
std::vector<Trace> traces_of_an_absence(const TempFolder& folder) {
  run_ranks(2, [&](World& world) {
    auto recorder = recorder_of(world, folder);
    auto group = world.make_group("dp", {0, 1});
    Tensor x = at::ones({3, 2}), flag = at::zeros({}, at::kBool);
    group.all_reduce(x, Reduction::kSum).wait();
    group.all_reduce(flag, Reduction::kMax).wait();
    if (world.rank() == 0) {
      group.set_timeout(std::chrono::milliseconds(20));
      error_of<CollectiveError>([&] { group.all_reduce(x, Reduction::kSum).wait(); });
    }
    EXPECT_TRUE(recorder.dump_failure("rank 1 hangs"));
  });
  return dtensor::read_traces(folder.path() / "traces");
}

TEST(FlightRecorder, WritesWhatARankCommunicated) {
  const TempFolder folder;
  const auto traces = traces_of_an_absence(folder);
  ASSERT_EQ(traces.size(), 2u);
  EXPECT_EQ(traces[0].rank, 0);
  EXPECT_EQ(traces[0].ranks, 2);
  EXPECT_EQ(traces[0].reason, "rank 1 hangs");
  ASSERT_EQ(traces[0].records.size(), 3u);
  ASSERT_EQ(traces[1].records.size(), 2u);
  const auto& first = traces[0].records[0];
  EXPECT_EQ(first.kind, "all_reduce");
  EXPECT_EQ(first.group.axis, "dp");
  EXPECT_EQ(first.group.global_ranks, (std::vector{0, 1}));
  EXPECT_EQ(first.sequence, 1u);
  EXPECT_EQ(first.bytes, 24);
  EXPECT_EQ(first.sizes, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(first.dtype, "float32");
  EXPECT_EQ(first.state, State::kDone);
  EXPECT_GE(*first.end, first.start);
  EXPECT_LE(*first.end, traces[0].written);
  EXPECT_GT(first.start, 1.7e9);  // seconds since 1970
  EXPECT_EQ(traces[0].records[2].state, State::kFailed);
  EXPECT_FALSE(traces[0].records[2].end);
}

TEST(FlightRecorder, TellsWhoIsMissingWhere) {
  const TempFolder folder;
  const auto traces = traces_of_an_absence(folder);
  EXPECT_EQ(dtensor::positions_text(traces),
            "rank 0 was in all_reduce #3 on axis dp (24 B, float32 [3, 2]); "
            "rank 1 was in none, the last was all_reduce #2 on axis dp (1 B, bool [])");
  EXPECT_EQ(dtensor::difference_text(traces),
            "all_reduce #3 on axis dp (24 B, float32 [3, 2]) of ranks 0, 1; rank 0 began it; rank "
            "1 did not begin it");
  EXPECT_THAT(dtensor::report_table(traces),
              AllOf(HasSubstr("\n    0  failed     dp                   3  all_reduce"),
                    HasSubstr("\n    1  after      dp                   2  all_reduce"),
                    HasSubstr("rank 1 did not begin it")));
  EXPECT_THAT(dtensor::positions_text({traces[0]}), HasSubstr("; rank 1 left no trace"));
  EXPECT_THAT(dtensor::difference_text({traces[0]}),
              HasSubstr("all_reduce #3 on axis dp (24 B, float32 [3, 2]) of ranks 0, 1; rank 0 "
                        "began it; rank 1 left no trace"));
}

TEST(FlightRecorder, TellsWhichRankCalledSomethingElse) {
  const TempFolder folder;
  run_ranks(2, [&](World& world) {
    auto recorder = recorder_of(world, folder);
    const auto group = world.make_group("tp", {0, 1});
    Tensor x = at::ones({world.rank() == 0 ? 4 : 6});
    group.barrier();
    error_of<CollectiveError>([&] { group.all_reduce(x, Reduction::kSum).wait(); });
    recorder.dump_failure("disagreement");
  });
  const auto traces = dtensor::read_traces(folder.path() / "traces");
  EXPECT_EQ(dtensor::difference_text(traces),
            "all_reduce #2 on axis tp (16 B, float32 [4]) of ranks 0, 1; rank 0 began it; rank 1 "
            "began all_reduce #2 on axis tp (24 B, float32 [6])");
}

TEST(FlightRecorder, RanksThatAgreeAreNotAccused) {
  const TempFolder folder;
  run_ranks(2, [&](World& world) {
    auto recorder = recorder_of(world, folder);
    const auto group = world.make_group("tp", {0, 1});
    for (int i = 0; i < 3; ++i) group.barrier();
    recorder.dump_asked("asked");
  });
  const auto traces = dtensor::read_traces(folder.path() / "traces");
  EXPECT_EQ(dtensor::difference_text(traces), "");
  EXPECT_THAT(dtensor::report_table(traces), HasSubstr("the ranks agree"));
}

// A rank fails and is asked for its trace at the same time: one file, which says why it failed.
TEST(FlightRecorder, AFailureIsNotOverwrittenByARequest) {
  const TempFolder folder;
  run_ranks(2, [&](World& world) {
    auto recorder = recorder_of(world, folder);
    world.make_group("tp", {0, 1}).barrier();
    EXPECT_TRUE(recorder.dump_asked("asked at first"));
    std::thread asks([&] {
      for (int i = 0; i < 20; ++i) EXPECT_TRUE(recorder.dump_asked("asked"));
    });
    EXPECT_TRUE(recorder.dump_failure("it failed"));
    asks.join();
  });
  const auto traces = dtensor::read_traces(folder.path() / "traces");
  ASSERT_EQ(traces.size(), 2u);
  for (const auto& trace : traces) EXPECT_EQ(trace.reason, "it failed");
}

// The oldest records are forgotten, by one rank more than by the other.
TEST(FlightRecorder, KeepsTheNewestRecords) {
  const TempFolder folder;
  run_ranks(2, [&](World& world) {
    auto recorder = recorder_of(world, folder, world.rank() == 0 ? 2 : 4);
    const auto group = world.make_group("tp", {0, 1});
    for (int i = 0; i < 5; ++i) group.barrier();
    recorder.dump_asked("asked");
  });
  const auto traces = dtensor::read_traces(folder.path() / "traces");
  ASSERT_EQ(traces[0].records.size(), 2u);
  ASSERT_EQ(traces[1].records.size(), 4u);
  EXPECT_EQ(traces[0].records[0].sequence, 4u);
  EXPECT_EQ(dtensor::difference_text(traces), "");
}

TEST(FlightRecorder, WritesNothingWhereItIsOffOrAlone) {
  const TempFolder folder;
  run_ranks(2, [&](World& world) {
    auto recorder = recorder_of(world, folder, 0);
    world.make_group("tp", {0, 1}).barrier();
    EXPECT_FALSE(recorder.dump_asked("asked"));
    EXPECT_TRUE(world.log().records().empty());
    EXPECT_EQ(world.log().total(dtensor::CollectiveKind::kBarrier, "tp").count, 1);
  });
  const World alone = World::single();
  EXPECT_FALSE(recorder_of(alone, folder).dump_asked("asked"));
  EXPECT_FALSE(std::filesystem::exists(folder / "traces"));
  EXPECT_THAT(error_of<UserError>([&] { dtensor::read_traces(folder / "traces"); }),
              AllOf(HasSubstr("holds no traces"), HasSubstr("comm.save_traces_folder")));
}

TEST(FlightRecorder, OtherFilesAndRunsAreLeftOut) {
  const TempFolder folder;
  traces_of_an_absence(folder);
  const auto traces = folder.path() / "traces";
  spill(traces / "notes.json", "{}");
  spill(traces / "torn.json", slurp(traces / "rank_0.json").substr(0, 100));
  auto old = nlohmann::json::parse(slurp(traces / "rank_1.json"));
  old["run"] = "another";
  old["rank"] = 2;
  old["written"] = 1.0;
  spill(traces / "rank_2.json", old.dump());
  EXPECT_EQ(dtensor::read_traces(traces).size(), 2u);
}

}  // namespace
}  // namespace longhaul::test
