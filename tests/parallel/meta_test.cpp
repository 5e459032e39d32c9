// One rank of many on the Meta device, without the others: a step's shapes and what it
// communicates, for planning.
#include <gmock/gmock.h>

#include "tests/parallel/ranks_of_model.h"

namespace longhaul::testing {
namespace {

using dtensor::CollectiveKind;

Job meta_job() {
  Job job;
  job.config.num_attention_heads = 4;
  job.settings.device = at::kMeta;
  return job;
}

at::Tensor forward_loss(RankOfModel& rank) {
  const auto hidden = rank.model().forward(rank.batch(), rank.context());
  at::Tensor total;
  for (size_t i = 0; i < hidden.size(); ++i) {
    const auto loss = rank.model().cross_entropy(hidden[i], rank.batch().towers[i].labels);
    total = i == 0 ? loss : total + loss;
  }
  return total;
}

void one_pass(RankOfModel& rank) {
  rank.begin_pass();
  backward(forward_loss(rank));
  rank.end_pass();
}

// Parameters that learn without a gradient of their sizes, or that have memory.
std::vector<std::string> not_planned(const nn::Module& model) {
  std::vector<std::string> names;
  for (const auto& parameter : model.parameters()) {
    const at::Tensor& weight = *parameter.tensor;
    const at::Tensor& grad = weight.grad();
    const auto local = [](const at::Tensor& x) {
      return dtensor::is_dtensor(x) ? dtensor::local_of(x) : x;
    };
    const bool fine = local(weight).is_meta() && grad.defined() && local(grad).is_meta() &&
                      grad.sizes() == weight.sizes() && grad.scalar_type() == weight.scalar_type();
    if (!fine && weight.requires_grad()) names.push_back(parameter.name);
  }
  return names;
}

const std::vector<RankLayout> kLayouts = {
    {.dp = 2, .ep = 2},
    {.dp = 4, .ep = 4},
    {.dp = 2, .cp = 2, .ep = 4},
    {.dp = 4, .cp = 2, .ep = 8, .split = SequenceSplit::kContiguous},
    {.tp = 2},
    {.cp = 2, .ep = 2, .tp = 2},
    {.dp = 2, .cp = 2, .ep = 8, .tp = 2, .fsdp = true},
};

void expect_planned(const Job& job) {
  for (const auto& layout : kLayouts) {
    for (const int number : {0, layout.ranks() - 1}) {
      SCOPED_TRACE(::testing::Message() << layout.text() << ", rank " << number);
      dtensor::World world = dtensor::World::fake(number, layout.ranks());
      RankOfModel rank(world, layout, job);
      one_pass(rank);
      EXPECT_THAT(not_planned(rank.model()), ::testing::IsEmpty());
    }
  }
}

TEST(MetaRanks, AStepOfARankWithItsShareOfTheExperts) { expect_planned(meta_job()); }

TEST(MetaRanks, RecomputedBlocks) {
  Job job = meta_job();
  job.settings.recompute.every = 1;
  expect_planned(job);
}

TEST(MetaRanks, WeightsAreTheRanksShare) {
  const RankLayout layout = {.dp = 2, .cp = 2, .ep = 4};
  dtensor::World world = dtensor::World::fake(3, layout.ranks());
  RankOfModel rank(world, layout, meta_job());
  backward(forward_loss(rank));
  int64_t seen = 0;
  for (const auto& parameter : rank.model().parameters()) {
    if (!v3::is_routed_expert(parameter.name)) continue;
    ++seen;
    for (const auto& x : {*parameter.tensor, parameter.tensor->grad()}) {
      ASSERT_TRUE(dtensor::is_dtensor(x)) << parameter.name;
      EXPECT_EQ(dtensor::local_of(x).size(0), 2) << parameter.name;  // 8 experts on 4 ranks
    }
  }
  EXPECT_EQ(seen, 3 * 3);  // three matrices of the layer with experts and of two MTP modules
}

// Two rows of 8 slots with two experts a token: a rank has 32 rows, whatever the others have.
TEST(MetaRanks, RowsAreSpreadEvenly) {
  const RankLayout layout = {.dp = 2, .cp = 2, .ep = 4};
  dtensor::World world = dtensor::World::fake(1, layout.ranks());
  RankOfModel rank(world, layout, meta_job());
  world.log().clear();
  backward(forward_loss(rank));
  int64_t exchanges = 0;
  for (const auto& record : world.log().records()) {
    if (record.kind != CollectiveKind::kAllToAll || record.dtype == "int64") continue;
    ++exchanges;
    EXPECT_EQ(record.sizes, (std::vector<int64_t>{32, 12}));
  }
  EXPECT_EQ(exchanges, 3 * 4);  // there and back, forwards and backwards, in three layers
}

// As text, so that a difference reads well.
std::vector<std::string> lines_of(const dtensor::CollectiveLog& log) {
  std::vector<std::string> lines;
  for (const auto& record : log.records()) {
    lines.push_back(fmt::format("{} over {}: {} [{}], {} bytes, no. {}", name_of(record.kind),
                                record.axis, record.dtype, fmt::join(record.sizes, ", "),
                                record.bytes, record.sequence));
  }
  return lines;
}

// Where the routing is balanced, as the Meta device takes it to be, a planned rank communicates
// what the real one does, in the same order.
TEST(MetaRanks, CommunicateWhatRealRanksDo) {
  Job job = meta_job();
  job.settings.force_load_balance = true;
  const auto d = documents({kSlots + 2, kSlots + 2, kSlots + 2, kSlots + 2});
  job.rows = pack({{d[0]}, {d[1]}, {d[2]}, {d[3]}}, kSlots + 2);
  for (const bool fsdp : {false, true}) {
    for (RankLayout layout :
         {RankLayout{.tp = 2}, RankLayout{.cp = 2, .ep = 2, .tp = 2},
          RankLayout{.dp = 2, .ep = 2, .tp = 2}, RankLayout{.dp = 2, .ep = 2}}) {
      layout.fsdp = fsdp;
      SCOPED_TRACE(layout.text());
      std::vector<std::vector<std::string>> real(static_cast<size_t>(layout.ranks()));
      test::run_ranks(layout.ranks(), [&](dtensor::World& world) {
        Job here = job;
        here.settings.device = at::kCPU;
        RankOfModel rank(world, layout, here);
        world.log().clear();
        one_pass(rank);
        real[static_cast<size_t>(world.rank())] = lines_of(world.log());
      });
      for (const int number : {0, layout.ranks() - 1}) {
        dtensor::World world = dtensor::World::fake(number, layout.ranks());
        RankOfModel rank(world, layout, job);
        world.log().clear();
        one_pass(rank);
        EXPECT_EQ(lines_of(world.log()), real[static_cast<size_t>(number)]) << "rank " << number;
        EXPECT_FALSE(real[static_cast<size_t>(number)].empty());
      }
    }
  }
}

}  // namespace
}  // namespace longhaul::testing
