// Which way the rules take: what moves and what does not, what is said of a gather that cannot be
// avoided, and what the link of an axis changes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/dtensor/redistribute.h"
#include "longhaul/ops/cross_entropy/cross_entropy.h"
#include "longhaul/ops/flash_attention/flash_attention.h"
#include "longhaul/ops/rms_norm/rms_norm.h"
#include "tests/dtensor/dtensor_table.h"
#include "tests/support/log_capture.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temp_folder.h"

namespace longhaul::test {
namespace {

using dtensor::DeviceMesh;
using dtensor::kAcrossHosts;
using dtensor::kWithinHost;
using dtensor::World;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const Placement kWhole = Placement::replicate(), kTerm = Placement::partial();

void on_two_ranks(const std::function<void(World&, const Mesh&)>& f) {
  run_ranks(2, [&](World& world) { f(world, DeviceMesh::make(world, {{"tp", 2}})); });
}

std::string moved(const World& world) {
  std::string text;
  for (const auto& record : world.log().records()) {
    text += std::string(text.empty() ? "" : " ") + dtensor::name_of(record.kind);
  }
  return text;
}

// What f makes of inputs in `placements`, and where it lies, without a collective.
void expect_nothing_moves(const std::vector<Tensor>& wholes, const std::vector<Placement>& from,
                          const std::function<Tensor(const std::vector<Tensor>&)>& f,
                          const std::string& placement) {
  on_two_ranks([&](World& world, const Mesh& mesh) {
    std::vector<Tensor> parts;
    for (size_t i = 0; i < wholes.size(); ++i) parts.push_back(scatter(wholes[i], mesh, {from[i]}));
    world.log().clear();
    const Tensor y = f(parts);
    EXPECT_EQ(moved(world), "");
    EXPECT_EQ(text_of(dtensor::spec_of(y).placements), "(" + placement + ")");
    EXPECT_LE((whole_of(y).to(at::kDouble) - f(wholes).to(at::kDouble)).abs().max().item<double>(),
              1e-12);
  });
}

Tensor ids() { return at::tensor({3, 0, 2, 2, 1, 3}, at::kLong); }

TEST(RuleChoice, TruthsOfPartsAreTerms) {
  const Tensor truth = at::tensor({0, 0, 0, 1}, at::kLong).to(at::kBool);
  const auto cut = Placement::shard(0);
  expect_nothing_moves(
      {truth}, {cut}, [](auto& x) { return x[0].any(); }, "Partial(max)");
  expect_nothing_moves(
      {truth}, {cut}, [](auto& x) { return x[0].all(); }, "Partial(min)");
}

TEST(RuleChoice, RowsAreIndexedWhereTheyLie) {
  const Tensor x = normal({4, 6}, 1);
  const Tensor index = at::stack({ids(), ids(), ids(), ids()});
  const auto rows = Placement::shard(0), columns = Placement::shard(1);
  expect_nothing_moves(
      {x, index}, {rows, rows}, [](auto& x) { return x[0].gather(1, x[1]); }, "Shard(0)");
  expect_nothing_moves(
      {x, index}, {rows, rows}, [](auto& x) { return x[0].scatter_add(1, x[1], x[0]); },
      "Shard(0)");
  expect_nothing_moves(
      {x, ids()}, {columns, kWhole}, [](auto& x) { return x[0].index_select(0, x[1]); },
      "Shard(1)");
  expect_nothing_moves(
      {x, ids()}, {kWhole, rows}, [](auto& x) { return x[0].index_select(1, x[1]); }, "Shard(1)");
  expect_nothing_moves(
      {x, ids()}, {kTerm, kWhole},
      [](auto& x) { return x[0].index(c10::List<std::optional<Tensor>>{x[1]}); }, "Partial(sum)");
}

TEST(RuleChoice, SlicesOfWhatIsAddedAreTerms) {
  const Tensor zeros = at::zeros({4, 3}, at::kDouble), added = normal({6, 3}, 2);
  const auto cut = Placement::shard(0);
  expect_nothing_moves(
      {zeros, ids(), added}, {kTerm, cut, cut},
      [](auto& x) { return x[0].index_add(0, x[1], x[2]); }, "Partial(sum)");
  expect_nothing_moves(
      {zeros, ids(), added}, {kTerm, cut, cut},
      [](auto& x) { return x[0].index_put(c10::List<std::optional<Tensor>>{x[1]}, x[2], true); },
      "Partial(sum)");
}

// Whole queries, and keys whose heads are dealt out: each rank takes its heads' slice of the
// queries.
TEST(RuleChoice, WholeQueriesAreAskedWhereTheKeysHeadsLie) {
  const Placement heads = Placement::shard(2);
  const auto attend = [](auto& x) {
    const Tensor doc_start = at::zeros({2, 6}, at::kLong);
    return ops::flash_attention(x[0], x[1], x[2], doc_start, {.scale = 0.3}).out_BSHV;
  };
  expect_nothing_moves({normal({2, 6, 4, 8}, 7), normal({2, 6, 4, 8}, 8), normal({2, 6, 4, 5}, 9)},
                       {kWhole, heads, heads}, attend, "Shard(2)");
}

// --- gathers are said or refused ----------------------------------------------------------------

TEST(Gathers, AreRefusedWhereTheRuleDoesNotAskForThem) {
  on_two_ranks([](World& world, const Mesh& mesh) {
    const Tensor x = dtensor::distribute(normal({4}, 3), mesh, {Placement::shard(0)});
    const Tensor index = dtensor::distribute(ids(), mesh, {kWhole});
    world.log().clear();
    EXPECT_THAT(error_of<Error>([&] { static_cast<void>(x.index_select(0, index)); }),
                AllOf(HasSubstr("aten::index_select"), HasSubstr("[4] (Shard(0)), [6] (Replicate)"),
                      HasSubstr("input 0 along axis tp"),
                      HasSubstr("longhaul/dtensor/rules/index.cpp"), HasSubstr("redistribute()")));
    EXPECT_EQ(moved(world), "");
    const Tensor whole = dtensor::redistribute(x, {kWhole});
    EXPECT_TRUE(
        at::equal(whole_of(whole.index_select(0, index)), normal({4}, 3).index_select(0, ids())));
  });
}

TEST(Gathers, AreSaidWithTheirReason) {
  const LogCapture log;
  on_two_ranks([](World& world, const Mesh& mesh) {
    const Tensor x = dtensor::distribute(normal({5}, 4), mesh, {Placement::shard(0)});
    world.log().clear();
    static_cast<void>(x.cumsum(0));
    EXPECT_EQ(moved(world), "all_gather");
  });
  EXPECT_THAT(log.text(), AllOf(HasSubstr("aten::cumsum on [5] (Shard(0))"),
                                HasSubstr("input 0 is gathered along axis tp"),
                                HasSubstr("longhaul/dtensor/rules/reductions.cpp")));
}

TEST(Gathers, AreNotSaidWhereAnotherDimIsCutInstead) {
  const LogCapture log;
  on_two_ranks([](World& world, const Mesh& mesh) {
    const Tensor x = dtensor::distribute(normal({4, 6}, 4), mesh, {Placement::shard(0)});
    world.log().clear();
    static_cast<void>(x.cumsum(0));
    EXPECT_EQ(moved(world), "all_to_all");
  });
  EXPECT_THAT(log.text(), Not(HasSubstr("gathered")));
}

int64_t count_of(const std::string& text, const std::string& part) {
  int64_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Gathers, OfOurOperatorsAreSaidOnce) {
  const LogCapture log;
  on_two_ranks([](World& world, const Mesh& mesh) {
    const Tensor x = dtensor::distribute(normal({3, 10}, 6), mesh, {Placement::shard(1)});
    const Tensor weight = dtensor::distribute(normal({10}, 7), mesh, {kWhole});
    world.log().clear();
    for (int i = 0; i < 2; ++i) static_cast<void>(ops::rms_norm(x, weight, 1e-6));
    EXPECT_EQ(moved(world), "all_gather all_gather");
  });
  EXPECT_EQ(count_of(log.text(),
                     "rms_norm on [3, 10] (Shard(1)), [10] (Replicate): input 0 is gathered along "
                     "axis tp: every rank computes the same"),
            2)
      << "by each rank: " << log.text();
}

TEST(Gathers, OfWhatEachRanksShareNeedsAreSaid) {
  const LogCapture log;
  on_two_ranks([](World&, const Mesh& mesh) {
    const Placement cut = Placement::shard(0);
    const Tensor hidden = dtensor::distribute(normal({4, 6}, 8), mesh, {cut});
    const Tensor weight = dtensor::distribute(normal({10, 6}, 9), mesh, {cut});
    static_cast<void>(ops::linear_cross_entropy(hidden, weight, at::zeros({4}, at::kLong)));
  });
  EXPECT_THAT(log.text(),
              HasSubstr("linear_cross_entropy on [4, 6] (Shard(0)), [10, 6] (Shard(0)), [4] plain: "
                        "input 0 is gathered along axis tp: each rank's share needs the whole"));
}

TEST(Gathers, OverAnAxisOfOneRankAreNone) {
  const LogCapture log;
  run_ranks(2, [](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"dp", 2}, {"tp", 1}});
    const Tensor x = dtensor::distribute(normal({3, 12}, 6), mesh, {kWhole, Placement::shard(1)});
    const Tensor weight = dtensor::distribute(normal({12}, 7), mesh, {kWhole, kWhole});
    static_cast<void>(ops::rms_norm(x, weight, 1e-6));
  });
  EXPECT_THAT(log.text(), Not(HasSubstr("gathered")));
}

TEST(Gathers, WithoutARuleTheFileOfTheFamilyIsNamed) {
  on_two_ranks([](World&, const Mesh& mesh) {
    const Tensor x = dtensor::distribute(normal({4, 4}, 5), mesh, {Placement::shard(0)});
    const auto error = [&](const std::function<void()>& f) { return error_of<Error>(f); };
    const std::string rules = "add one to longhaul/dtensor/rules/";
    EXPECT_THAT(error([&] { static_cast<void>(at::linalg_inv(x)); }),
                AllOf(HasSubstr("no sharding rule for aten::linalg_inv"),
                      HasSubstr("[4, 4] (Shard(0))"), HasSubstr(rules + "matmul.cpp")));
    EXPECT_THAT(error([&] { static_cast<void>(at::sinh(x)); }), HasSubstr(rules + "pointwise.cpp"));
    EXPECT_THAT(error([&] { static_cast<void>(x.diagonal()); }), HasSubstr(rules + "views.cpp"));
    EXPECT_THAT(error([&] { static_cast<void>(x.var(0)); }), HasSubstr(rules + "reductions.cpp"));
    EXPECT_THAT(error([&] { static_cast<void>(at::randn_like(x)); }),
                HasSubstr(rules + "factory.cpp"));
    EXPECT_THAT(error([&] { static_cast<void>(x.take(x.to(at::kLong))); }),
                HasSubstr(rules + "index.cpp"));
  });
}

// --- links --------------------------------------------------------------------------------------

// Rank r is on host hosts[r].
Mesh mesh_on_hosts(World& world, std::vector<int> hosts,
                   const std::vector<DeviceMesh::AxisSize>& axes) {
  world.set_hosts(std::move(hosts));
  return DeviceMesh::make(world, axes);
}

TEST(Links, AreOfTheSlowestGroupOfAnAxisOnEveryRank) {
  for (int rank = 0; rank < 6; ++rank) {
    World world = World::fake(rank, 6);
    // Of the pairs 0 1, 2 3 and 4 5 only the second is on two hosts.
    const Mesh mesh = mesh_on_hosts(world, {0, 0, 0, 1, 1, 1}, {{"dp", 3}, {"tp", 2}});
    EXPECT_EQ(mesh->axis("tp").link(), kAcrossHosts) << rank;
    EXPECT_EQ(mesh->axis("dp").link(), kAcrossHosts) << rank;
    World at_home = World::fake(rank, 6);
    EXPECT_EQ(DeviceMesh::make(at_home, {{"tp", 6}})->axis("tp").link(), kWithinHost);
    World paired = World::fake(rank, 6);
    const Mesh pairs = mesh_on_hosts(paired, {0, 0, 1, 1, 2, 2}, {{"dp", 3}, {"tp", 2}});
    EXPECT_EQ(pairs->axis("tp").link(), kWithinHost) << rank;
    EXPECT_EQ(pairs->axis("dp").link(), kAcrossHosts) << rank;
  }
}

TEST(Links, PriceBytesAndCollectives) {
  const auto cost = [](int64_t bytes, const dtensor::Link& link, const Placement& from,
                       const Placement& to) {
    return dtensor::redistribute_cost(bytes, 4, link, from, to);
  };
  const auto cut = Placement::shard(0), other = Placement::shard(1);
  for (const auto& link : {kWithinHost, kAcrossHosts}) {
    const double gather = cost(1 << 20, link, cut, kWhole);
    EXPECT_DOUBLE_EQ(gather, link.latency_us + 0.75 * (1 << 20) / link.bytes_per_us);
    EXPECT_LT(cost(1 << 20, link, cut, other), gather);
    EXPECT_GT(cost(1 << 20, link, kTerm, kWhole), gather);
    EXPECT_GT(cost(0, link, cut, kWhole), 0) << "a collective of nothing takes its time";
  }
  EXPECT_GT(cost(1 << 20, kAcrossHosts, cut, kWhole), cost(1 << 20, kWithinHost, cut, kWhole));
  EXPECT_EQ(cost(1 << 20, kAcrossHosts, kWhole, cut), cost(1 << 20, kWithinHost, kWhole, cut));
}

// One collective of eight bytes an element, or two of one and two: on the link within a host the
// latency of the second weighs more, across hosts the bytes do.
TEST(Links, DecideBetweenFewerCollectivesAndFewerBytes) {
  const auto chosen = [](std::vector<int> hosts) {
    World world = World::fake(0, 2);
    const Mesh mesh = mesh_on_hosts(world, std::move(hosts), {{"tp", 2}});
    const auto part = [&](at::ScalarType dtype, int64_t dim) {
      return dtensor::distribute(at::zeros({350, 1000}, dtype), mesh, {Placement::shard(dim)});
    };
    const Tensor condition = part(at::kBool, 0), x = part(at::kDouble, 1),
                 y = part(at::kBFloat16, 0);
    world.log().clear();
    static_cast<void>(at::where(condition, x, y));
    return moved(world);
  };
  EXPECT_EQ(chosen({0, 0}), "all_to_all");
  EXPECT_EQ(chosen({0, 1}), "all_to_all all_to_all");
}

// A tensor cut along both axes is put together along the slow one first, while its parts are small;
// terms are cut along the fast one before they are added up along the slow one.
TEST(Links, SlowAxesMoveTheSmallerParts) {
  for (const bool cp_is_slow : {true, false}) {
    run_ranks(4, [&](World& world) {
      const Mesh mesh =
          mesh_on_hosts(world, cp_is_slow ? std::vector{0, 0, 1, 1} : std::vector{0, 1, 0, 1},
                        {{"cp", 2}, {"tp", 2}});
      const std::string slow = cp_is_slow ? "cp" : "tp", fast = cp_is_slow ? "tp" : "cp";
      const auto bytes = [&](const std::string& axis) {
        int64_t sum = 0;
        for (const auto& record : world.log().records()) {
          if (record.axis == axis) sum += record.bytes;
        }
        return sum;
      };
      const Tensor whole = normal({8, 8}, 6);  // 512 bytes
      Tensor x = scatter(whole, mesh, {Placement::shard(0), Placement::shard(1)});
      world.log().clear();
      EXPECT_TRUE(at::equal(dtensor::local_of(dtensor::redistribute(x, {kWhole, kWhole})), whole));
      EXPECT_EQ(bytes(slow), 128);
      EXPECT_EQ(bytes(fast), 256);

      x = scatter(whole, mesh, {kTerm, kTerm});
      const auto cut = Placement::shard(0);
      world.log().clear();
      static_cast<void>(
          dtensor::redistribute(x, cp_is_slow ? Placements{kWhole, cut} : Placements{cut, kWhole}));
      EXPECT_EQ(bytes(fast), 512);
      EXPECT_EQ(bytes(slow), 256);
    });
  }
}

}  // namespace
}  // namespace longhaul::test
