// The log itself, and what a communicator writes into it.
#include "longhaul/dtensor/collective_log.h"

#include <gtest/gtest.h>

#include "tests/support/run_ranks.h"

namespace longhaul {
namespace {

using at::Tensor;
using dtensor::CollectiveKind;
using dtensor::CollectiveLog;
using dtensor::CollectiveRecord;
using dtensor::Communicator;
using dtensor::Reduction;
using dtensor::World;

CollectiveRecord record(CollectiveKind kind, const std::string& axis, int64_t bytes) {
  CollectiveRecord made;
  made.kind = kind;
  made.axis = axis;
  made.bytes = bytes;
  return made;
}

TEST(CollectiveLog, KeepsTheNewestAndCountsAll) {
  CollectiveLog log(3);
  for (int64_t i = 1; i <= 5; ++i) log.append(record(CollectiveKind::kAllGather, "tp", i));
  const auto kept = log.records();
  ASSERT_EQ(kept.size(), 3u);
  EXPECT_EQ(kept[0].bytes, 3);
  EXPECT_EQ(kept[2].bytes, 5);
  EXPECT_EQ(log.total(CollectiveKind::kAllGather, "tp").count, 5);
  EXPECT_EQ(log.total(CollectiveKind::kAllGather, "tp").bytes, 15);
}

TEST(CollectiveLog, CountsByKindAndAxis) {
  CollectiveLog log;
  log.append(record(CollectiveKind::kAllGather, "tp", 1));
  log.append(record(CollectiveKind::kAllGather, "dp", 2));
  log.append(record(CollectiveKind::kAllReduce, "dp", 4));
  EXPECT_EQ(log.total(CollectiveKind::kAllGather).count, 2);
  EXPECT_EQ(log.total(CollectiveKind::kAllGather).bytes, 3);
  EXPECT_EQ(log.total(CollectiveKind::kAllGather, "dp").bytes, 2);
  EXPECT_EQ(log.total(CollectiveKind::kAllReduce, "tp").count, 0);
  log.clear();
  EXPECT_TRUE(log.records().empty());
  EXPECT_EQ(log.total(CollectiveKind::kAllGather).count, 0);
}

TEST(CollectiveLog, AnEndFindsItsRecord) {
  CollectiveLog log(2);
  const auto dropped = log.append(record(CollectiveKind::kBarrier, "a", 0));
  const auto first = log.append(record(CollectiveKind::kBarrier, "b", 0));
  const auto second = log.append(record(CollectiveKind::kBarrier, "c", 0));
  log.finish(second, 7);
  log.finish(dropped, 9);
  EXPECT_EQ(log.records()[0].end_ns, 0);
  EXPECT_EQ(log.records()[1].end_ns, 7);
  log.clear();
  const auto later = log.append(record(CollectiveKind::kBarrier, "d", 0));
  log.finish(first, 9);
  EXPECT_EQ(log.records()[0].end_ns, 0);
  log.finish(later, 8);
  EXPECT_EQ(log.records()[0].end_ns, 8);
}

TEST(CollectiveLog, ACommunicatorWritesWhatItDoes) {
  test::run_ranks(2, [](World& world) {
    const Communicator group = world.make_group("tp", {0, 1});
    const Communicator other = world.make_group("dp", {0, 1});
    Tensor whole = at::zeros({4, 3}, at::kBFloat16), part = at::zeros({2, 3}, at::kBFloat16);
    auto gather = group.all_gather(whole, part);
    EXPECT_EQ(world.log().records().at(0).end_ns, 0);
    gather.wait();
    group.reduce_scatter(part, whole, Reduction::kSum).wait();
    Tensor flag = at::zeros({}, at::kBool);
    other.all_reduce(flag, Reduction::kMax).wait();
    group.all_to_all(whole, whole.clone(), {2, 2}, {2, 2}).wait();
    group.broadcast(part, 1).wait();
    group.barrier();

    const auto records = world.log().records();
    ASSERT_EQ(records.size(), 6u);
    const auto expect = [&](size_t i, CollectiveKind kind, const std::string& axis,
                            std::vector<int64_t> sizes, int64_t bytes, const std::string& dtype,
                            uint64_t sequence) {
      EXPECT_EQ(records[i].kind, kind) << i;
      EXPECT_EQ(records[i].axis, axis) << i;
      EXPECT_EQ(records[i].sizes, sizes) << i;
      EXPECT_EQ(records[i].bytes, bytes) << i;
      EXPECT_EQ(records[i].dtype, dtype) << i;
      EXPECT_EQ(records[i].sequence, sequence) << i;
      EXPECT_GE(records[i].end_ns, records[i].start_ns) << i;
      if (i > 0) {
        EXPECT_GE(records[i].start_ns, records[i - 1].end_ns) << i;
      }
    };
    expect(0, CollectiveKind::kAllGather, "tp", {2, 3}, 12, "bfloat16", 1);
    expect(1, CollectiveKind::kReduceScatter, "tp", {4, 3}, 24, "bfloat16", 2);
    expect(2, CollectiveKind::kAllReduce, "dp", {}, 1, "bool", 1);
    expect(3, CollectiveKind::kAllToAll, "tp", {4, 3}, 24, "bfloat16", 3);
    expect(4, CollectiveKind::kBroadcast, "tp", {2, 3}, 12, "bfloat16", 4);
    expect(5, CollectiveKind::kBarrier, "tp", {}, 0, "", 5);
  });
}

TEST(CollectiveLog, TotalsCountTimeAndWhatWasAddedSince) {
  const test::RankOptions options{.link = {.latency_ms = 20, .bytes_per_second = 0}};
  test::run_ranks(
      2,
      [](World& world) {
        const Communicator group = world.make_group("tp", {0, 1});
        group.barrier();
        const auto before = world.log().totals();
        Tensor x = at::ones({4});
        auto pending = group.all_reduce(x, Reduction::kSum);
        std::this_thread::sleep_for(std::chrono::milliseconds(30));  // the rank computes meanwhile
        pending.wait();
        const auto added = since(before, world.log().totals());
        ASSERT_EQ(added.size(), 1u);
        const auto& [key, total] = *added.begin();
        EXPECT_EQ(key, (std::pair{CollectiveKind::kAllReduce, std::string("tp")}));
        EXPECT_EQ(total.count, 1);
        EXPECT_EQ(total.bytes, 16);
        EXPECT_GE(total.under_way_ns, 30'000'000);
        EXPECT_GE(total.waited_ns, 0);
        EXPECT_LE(total.waited_ns, total.under_way_ns - 29'000'000);
        EXPECT_GE(world.log().total(CollectiveKind::kBarrier).waited_ns, 20'000'000);
      },
      options);
}

// What began in one step and was waited for in the next.
TEST(CollectiveLog, TimeOfEarlierCollectivesCounts) {
  test::run_ranks(2, [](World& world) {
    const Communicator group = world.make_group("tp", {0, 1});
    Tensor x = at::ones({4});
    auto pending = group.all_reduce(x, Reduction::kSum);
    const auto before = world.log().totals();
    pending.wait();
    const auto added = since(before, world.log().totals());
    ASSERT_EQ(added.size(), 1u);
    EXPECT_EQ(added.begin()->second.count, 0);
    EXPECT_GT(added.begin()->second.under_way_ns, 0);
    EXPECT_TRUE(since(world.log().totals(), world.log().totals()).empty());
  });
}

TEST(CollectiveLog, AGroupOfOneWritesNothing) {
  World world = World::single();
  const Communicator group = world.make_group("tp", {0});
  Tensor tensor = at::ones({2});
  group.all_reduce(tensor, Reduction::kSum).wait();
  group.barrier();
  EXPECT_TRUE(world.log().records().empty());
}

}  // namespace
}  // namespace longhaul
