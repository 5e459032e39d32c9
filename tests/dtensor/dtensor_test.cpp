// What a DTensor is to its user: a tensor with global sizes that autograd, views and in-place
// updates work on, and an error with a name where something cannot be.
#include "longhaul/dtensor/dtensor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/dtensor/dispatch_cache.h"
#include "tests/dtensor/dtensor_table.h"
#include "tests/support/run_ranks.h"

namespace longhaul::test {
namespace {

using dtensor::DeviceMesh;
using dtensor::World;
using ::testing::HasSubstr;

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

void on_two_ranks(const std::function<void(World&, const Mesh&)>& f) {
  run_ranks(2, [&](World& world) { f(world, DeviceMesh::make(world, {{"tp", 2}})); });
}

// Operators that are made of others arrive below autograd as they are.
TEST(DTensor, ComposedOperatorsBelowAutograd) {
  on_two_ranks([](World&, const Mesh& mesh) {
    const Tensor a = normal({4, 6}, 1), b = normal({6, 3}, 2);
    const Tensor x = dtensor::distribute(a, mesh, {Placement::shard(0)});
    const Tensor y = dtensor::distribute(b, mesh, {Placement::replicate()});
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor product = at::matmul(x.reshape({4, 6}), y);
    ASSERT_TRUE(dtensor::is_dtensor(product));
    EXPECT_TRUE(
        at::equal(dtensor::local_of(dtensor::redistribute(product, {Placement::replicate()})),
                  at::matmul(a, b)));
  });
}

TEST(DTensor, HasTheSizesOfTheWholeAndHoldsAPart) {
  on_two_ranks([](World& world, const Mesh& mesh) {
    const Tensor whole = normal({5, 4}, 1);
    const Tensor x = dtensor::distribute(whole, mesh, {Placement::shard(0)});
    EXPECT_EQ(x.sizes(), whole.sizes());
    EXPECT_EQ(x.strides(), whole.strides());
    EXPECT_EQ(x.scalar_type(), at::kDouble);
    EXPECT_TRUE(x.is_contiguous());
    EXPECT_EQ(dtensor::local_of(x).size(0), world.rank() == 0 ? 3 : 2);
  });
}

TEST(DTensor, FromLocalAndToLocalCarryGradients) {
  on_two_ranks([](World& world, const Mesh& mesh) {
    const Tensor part = normal({3, 4}, 2 + world.rank()).requires_grad_();
    const Tensor x = dtensor::from_local(part, mesh, {Placement::shard(0)});
    EXPECT_EQ(x.size(0), 6);
    const Tensor y = dtensor::to_local(x * 3);
    torch::autograd::backward({y.sum()}, {});
    EXPECT_TRUE(at::equal(part.grad(), at::full({3, 4}, 3.0, at::kDouble)));
  });
}

TEST(DTensor, TermsOfAGradientStayTermsUntilTheyMustBeReduced) {
  on_two_ranks([](World& world, const Mesh& mesh) {
    const Tensor w =
        dtensor::distribute(normal({4, 4}, 3), mesh, {Placement::replicate()}).requires_grad_();
    const Tensor x = dtensor::distribute(normal({6, 4}, 4), mesh, {Placement::shard(0)});
    world.log().clear();
    torch::autograd::backward({at::mm(x, w).sum()}, {});
    EXPECT_EQ(text_of(dtensor::spec_of(w.grad()).placements), "(Partial(sum))");
    EXPECT_EQ(world.log().records().size(), 0U);
  });
}

TEST(DTensor, InPlaceUpdatesCountVersions) {
  on_two_ranks([](World&, const Mesh& mesh) {
    const Tensor x =
        dtensor::distribute(normal({4, 4}, 5), mesh, {Placement::shard(1)}).requires_grad_();
    Tensor y = x * 2;
    const Tensor z = y * y;
    y.add_(1);
    EXPECT_THAT(error_of([&] { torch::autograd::backward({z.sum()}, {}); }),
                HasSubstr("modified by an inplace operation"));
  });
}

TEST(DTensor, AReplicatedProductStaysReplicated) {
  on_two_ranks([](World& world, const Mesh& mesh) {
    const Tensor x = dtensor::distribute(normal({6, 4}, 6), mesh, {Placement::replicate()});
    const Tensor w =
        dtensor::distribute(normal({4, 8}, 7), mesh, {Placement::replicate()}).requires_grad_();
    world.log().clear();
    const Tensor y = at::mm(x, w);
    EXPECT_EQ(text_of(dtensor::spec_of(y).placements), "(Replicate)");
    torch::autograd::backward({y}, {at::ones_like(y)});
    EXPECT_EQ(text_of(dtensor::spec_of(w.grad()).placements), "(Replicate)");
    EXPECT_EQ(world.log().records().size(), 0U);
  });
}

TEST(DTensor, ErrorsNameOperatorPlacementsAndPlace) {
  on_two_ranks([](World&, const Mesh& mesh) {
    const Tensor x = dtensor::distribute(normal({4, 4}, 8), mesh, {Placement::shard(0)});
    EXPECT_THAT(
        error_of([&] { static_cast<void>(at::linalg_inv(x)); }),
        AllOf(HasSubstr("no sharding rule for aten::linalg_inv"), HasSubstr("[4, 4] (Shard(0))"),
              HasSubstr("longhaul/dtensor/rules/matmul.cpp")));
    EXPECT_THAT(error_of([&] {
                  static_cast<void>(x + normal({4, 4}, 9));
                }),
                AllOf(HasSubstr("aten::add"), HasSubstr("plain tensor [4, 4] beside a DTensor")));
    EXPECT_THAT(
        error_of([&] {
          static_cast<void>(dtensor::from_local(normal({4, 4}, 9), mesh, {Placement::shard(2)}));
        }),
        HasSubstr("Shard(2) of a tensor with 2 dims"));
    const std::vector<int64_t> sizes = {9, 4};
    EXPECT_THAT(error_of([&] {
                  static_cast<void>(
                      dtensor::from_local(normal({3, 4}, 9), mesh, {Placement::shard(0)}, sizes));
                }),
                HasSubstr("expected ["));
    EXPECT_THAT(error_of([&] { static_cast<void>(dtensor::local_of(normal({2}, 1))); }),
                HasSubstr("expected a DTensor"));
  });
}

TEST(DTensor, TermsAreRoundedTogether) {
  on_two_ranks([](World&, const Mesh& mesh) {
    // 0.5 on each rank: the sum is 1.
    const Tensor x = dtensor::from_local(at::full({4}, 0.5), mesh, {Placement::partial()});
    EXPECT_TRUE(at::equal(whole_of(x.to(at::kLong)), at::ones({4}, at::kLong)));
  });
}

TEST(DTensor, NumbersThatChangeTakeNoMemory) {
  on_two_ranks([](World&, const Mesh& mesh) {
    const Tensor x = dtensor::distribute(normal({4}, 1), mesh, {Placement::shard(0)});
    static_cast<void>(x / 3.0);
    const size_t known = mesh->cache().size();
    EXPECT_GT(known, 0u);
    static_cast<void>(x / 3.0);
    for (int i = 1; i < 9; ++i) static_cast<void>(x / (i + 0.5));
    EXPECT_EQ(mesh->cache().size(), known);
  });
}

struct TwoInputs : torch::autograd::Function<TwoInputs> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& a, const Tensor& b) {
    return a + b.sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0], Tensor()};
  }
};

TEST(DTensor, AGradientThatIsNotThereStaysAway) {
  on_two_ranks([](World&, const Mesh& mesh) {
    const Tensor part = normal({3, 4}, 2).requires_grad_(),
                 other = normal({3, 4}, 3).requires_grad_();
    const Tensor a = dtensor::from_local(part, mesh, {Placement::shard(0)});
    const Tensor b = dtensor::from_local(other, mesh, {Placement::shard(0)});
    const Tensor y = TwoInputs::apply(a, dtensor::redistribute(b, {Placement::replicate()}));
    torch::autograd::backward({dtensor::full_tensor(y).sum()}, {});
    EXPECT_TRUE(at::equal(part.grad(), at::ones({3, 4}, at::kDouble)));
  });
}

TEST(DTensor, WritingIntoAnotherPlacementIsAnError) {
  on_two_ranks([](World&, const Mesh& mesh) {
    const Tensor terms = scatter(normal({4, 4}, 10), mesh, {Placement::partial()});
    Tensor x = terms;
    EXPECT_THAT(error_of([&] { x.exp_(); }), HasSubstr("no way to compute"));
  });
}

TEST(LocalMap, ComputesOnPartsWithGradients) {
  on_two_ranks([](World&, const Mesh& mesh) {
    const Tensor whole = normal({6, 4}, 11), scale = normal({4}, 12);
    const Tensor x = dtensor::distribute(whole, mesh, {Placement::replicate()}).requires_grad_();
    const Tensor w = dtensor::distribute(scale, mesh, {Placement::replicate()}).requires_grad_();
    const auto y = dtensor::local_map(mesh,
                                      {{x, {Placement::shard(0)}, {Placement::shard(0)}},
                                       {w, {Placement::replicate()}, {Placement::partial()}}},
                                      {{{Placement::shard(0)}, {}}}, [](std::vector<Tensor> parts) {
                                        return std::vector<Tensor>{parts[0] * parts[1]};
                                      });
    torch::autograd::backward({dtensor::full_tensor(y[0].square()).sum()}, {});
    EXPECT_LE((whole_of(x.grad()) - 2 * whole * scale.square()).abs().max().item<double>(), 1e-12);
    EXPECT_LE((whole_of(w.grad()) - (2 * whole.square() * scale).sum(0)).abs().max().item<double>(),
              1e-12);
  });
}

TEST(DeviceMesh, NamesAndSlices) {
  run_ranks(6, [](World& world) {
    const Mesh mesh = DeviceMesh::make(world, {{"dp", 3}, {"tp", 2}});
    EXPECT_EQ(mesh->axis("dp").rank(), world.rank() / 2);
    EXPECT_EQ(mesh->axis("tp").rank(), world.rank() % 2);
    const Mesh turned = mesh->slice({"tp", "dp"});
    // tp cuts first: 7 rows are 4 and 3, then each in three.
    const auto box = turned->local_box({7}, {Placement::shard(0), Placement::shard(0)});
    const int64_t tp = world.rank() % 2, dp = world.rank() / 2;
    const int64_t half = tp == 0 ? 4 : 3, piece = (half + 2) / 3;
    EXPECT_EQ(box.offsets[0], tp * 4 + std::min(half, dp * piece));
    EXPECT_EQ(box.sizes[0], std::min(half, (dp + 1) * piece) - std::min(half, dp * piece));
    EXPECT_THAT(error_of([&] { static_cast<void>(mesh->axis("cp")); }),
                AllOf(HasSubstr("no mesh axis \"cp\""), HasSubstr("dp 3 x tp 2")));
  });
  run_ranks(2, [](World& world) {
    EXPECT_THAT(error_of([&] {
                  DeviceMesh::make(world, {{"dp", 3}});
                }),
                AllOf(HasSubstr("has 3 ranks"), HasSubstr("there are 2")));
  });
}

}  // namespace
}  // namespace longhaul::test
