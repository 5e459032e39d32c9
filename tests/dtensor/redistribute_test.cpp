// Every placement into every other, on one axis and on two, with slices that are uneven or empty.
#include "longhaul/dtensor/redistribute.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/dtensor/dtensor_table.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temp_folder.h"

namespace longhaul::test {
namespace {

using dtensor::DeviceMesh;
using dtensor::World;

void expect_same(const Tensor& got, const Tensor& want, const std::string& what) {
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  const double error = got.numel() ? (got - want).abs().max().item<double>() : 0;
  EXPECT_LE(error, 1e-12) << what;
}

void check_pair(const Mesh& mesh, const Tensor& whole, const Placements& from,
                const Placements& to) {
  const std::string what = fmt::format("[{}] {} -> {} on {}", fmt::join(whole.sizes(), ", "),
                                       text_of(from), text_of(to), mesh->text());
  const Tensor x = scatter(whole, mesh, from);
  const Tensor y = dtensor::redistribute(x, to);
  ASSERT_EQ(text_of(dtensor::spec_of(y).placements), text_of(to)) << what;
  ASSERT_EQ(dtensor::local_of(y).sizes(), at::IntArrayRef(mesh->local_sizes(whole.sizes(), to)))
      << what;
  bool terms = false;
  for (const auto& placement : to) terms |= placement.is_partial();
  if (!terms) {
    expect_same(dtensor::local_of(y), dtensor::local_of(dtensor::distribute(whole, mesh, to)),
                what);
  }
  expect_same(whole_of(y), whole, what);
}

// Partial comes out of itself only.
bool possible(const Placements& from, const Placements& to) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (to[i].is_partial() && !from[i].is_partial()) return false;
  }
  return true;
}

TEST(Redistribute, OneAxis) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_ranks(ranks, [&](World& world) {
      const Mesh mesh = DeviceMesh::make(world, {{"tp", ranks}});
      for (const auto& sizes : std::vector<std::vector<int64_t>>{{8, 6, 4}, {5, 3, 7}, {1, 2, 9}}) {
        const Tensor whole = normal(sizes, 1);
        for (const auto& from : all_placements(3)) {
          for (const auto& to : all_placements(3)) {
            if (possible({from}, {to})) check_pair(mesh, whole, {from}, {to});
          }
        }
      }
    });
  }
}

TEST(Redistribute, TwoAxes) {
  for (const auto& [a, b] : std::vector<std::pair<int, int>>{{2, 2}, {2, 3}, {3, 2}}) {
    run_ranks(a * b, [&, a = a, b = b](World& world) {
      const Mesh mesh = DeviceMesh::make(world, {{"cp", a}, {"tp", b}});
      const Tensor whole = normal({7, 5}, 2);
      for (const auto& from0 : all_placements(2)) {
        for (const auto& from1 : all_placements(2)) {
          for (const auto& to0 : all_placements(2)) {
            for (const auto& to1 : all_placements(2)) {
              if (possible({from0, from1}, {to0, to1})) {
                check_pair(mesh, whole, {from0, from1}, {to0, to1});
              }
            }
          }
        }
      }
    });
  }
}

TEST(Redistribute, ThreeAxesCutOneDim) {
  run_ranks(8, [&](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"dp", 2}, {"cp", 2}, {"tp", 2}});
    const Tensor whole = normal({13, 3}, 3);
    const auto all = all_placements(1, /*with_partial=*/false);
    for (const auto& a : all) {
      for (const auto& b : all) {
        for (const auto& c : all) {
          check_pair(mesh, whole, {a, b, c}, {c, a, b});
          check_pair(mesh, whole, {a, b, c}, {b, b, Placement::shard(1)});
        }
      }
    }
  });
}

TEST(Redistribute, OtherReductions) {
  run_ranks(3, [&](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"tp", 3}});
    const Tensor whole = normal({4, 5}, 4);
    for (const auto reduction : {Reduction::kAvg, Reduction::kMax, Reduction::kMin}) {
      const Tensor term = whole + static_cast<double>(world.rank());
      const Tensor x = dtensor::from_local(term, mesh, {Placement::partial(reduction)});
      const double shift = reduction == Reduction::kAvg ? 1 : reduction == Reduction::kMax ? 2 : 0;
      expect_same(whole_of(x), whole + shift, "whole");
      expect_same(whole_of(dtensor::redistribute(x, {Placement::shard(0)})), whole + shift, "cut");
    }
  });
}

// Each of n averaged terms has an n-th of the gradient.
TEST(Redistribute, GradientsOfAveragedTerms) {
  run_ranks(3, [&](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"tp", 3}});
    const Tensor weights = normal({4, 5}, 5);
    for (const auto& to : {Placement::replicate(), Placement::shard(0)}) {
      const Tensor term = normal({4, 5}, 4).requires_grad_();
      const Tensor mean = dtensor::from_local(term, mesh, {Placement::partial(Reduction::kAvg)});
      const Tensor whole = dtensor::full_tensor(dtensor::redistribute(mean, {to}));
      torch::autograd::backward({(whole * weights).sum()}, {});
      expect_same(term.grad(), weights / 3, to.text());
    }
  });
}

TEST(Redistribute, PartsOfAMaximumHaveNoGradient) {
  run_ranks(2, [&](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"tp", 2}});
    for (const auto reduction : {Reduction::kMax, Reduction::kMin}) {
      const Placement placement = Placement::partial(reduction);
      const Tensor part = normal({4}, 4).requires_grad_();
      EXPECT_THAT(
          error_of<Error>([&] { static_cast<void>(dtensor::from_local(part, mesh, {placement})); }),
          ::testing::AllOf(::testing::HasSubstr(placement.text()),
                           ::testing::HasSubstr("needs a gradient")));
      EXPECT_NO_THROW(static_cast<void>(dtensor::from_local(part.detach(), mesh, {placement})));
    }
  });
}

TEST(Redistribute, TheCheapWayIsTaken) {
  run_ranks(2, [&](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"tp", 2}});
    const auto kinds_of = [&](const Placement& from, const Placement& to) {
      const Tensor x = scatter(normal({4, 6}, 5), mesh, {from});
      world.log().clear();
      static_cast<void>(dtensor::redistribute(x, {to}));
      std::string kinds;
      for (const auto& record : world.log().records()) kinds += dtensor::name_of(record.kind);
      return kinds;
    };
    const auto replicate = Placement::replicate(), partial = Placement::partial();
    EXPECT_EQ(kinds_of(replicate, Placement::shard(0)), "");
    EXPECT_EQ(kinds_of(Placement::shard(0), replicate), "all_gather");
    EXPECT_EQ(kinds_of(Placement::shard(0), Placement::shard(1)), "all_to_all");
    EXPECT_EQ(kinds_of(partial, Placement::shard(1)), "reduce_scatter");
    EXPECT_EQ(kinds_of(partial, replicate), "all_reduce");
  });
}

TEST(Redistribute, NothingBecomesTerms) {
  run_ranks(2, [&](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"tp", 2}});
    const Tensor x = dtensor::distribute(normal({4, 6}, 6), mesh, {Placement::replicate()});
    EXPECT_THROW(static_cast<void>(dtensor::redistribute(x, {Placement::partial()})), Error);
  });
}

}  // namespace
}  // namespace longhaul::test
