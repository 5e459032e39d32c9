#include "longhaul/nn/module.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace longhaul::testing {
namespace {

struct Leaf : nn::Module {
  at::Tensor weight, counts;
  ops::Kernel kernel = ops::Kernel::kReference;
  Leaf() {
    add_parameter("weight", weight, {3, 4}, nn::Init::kNormal, {});
    add_buffer("counts", counts, {3}, {});
    add_kernel("gmm", kernel);
  }
};

struct Tree : nn::Module {
  Leaf a, b;
  ops::Kernel kernel = ops::Kernel::kReference;
  Tree() {
    add_kernel("dsa", kernel);
    add_child("a", a);
    add_child("inner.b", b);
  }
};

TEST(Module, DescribesItsTree) {
  Tree tree;
  tree.a.kernel = ops::Kernel::kFused;
  tree.b.weight.set_requires_grad(false);
  EXPECT_EQ(tree.describe(),
            " [dsa: reference]\n"
            "  a [gmm: fused]\n"
            "    weight [3, 4]\n"
            "    counts [3], buffer\n"
            "  inner.b [gmm: reference]\n"
            "    weight [3, 4], frozen\n"
            "    counts [3], buffer\n");
}

}  // namespace
}  // namespace longhaul::testing
