// Nothing of the size of sequence times sequence: with twice the queries and keys the largest
// allocation of the fused operators grows twofold, forward and backward, for the instruction set
// that LONGHAUL_ISA names (ctest runs this once for each).
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"
#include "tests/ops/allocations.h"
#include "tests/ops/fused_kernels.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;

constexpr int64_t kHeads = 2, kWidth = 32, kTopK = 48;

// One row of a batch of S tokens.
struct Sequence {
  at::Tensor starts, query, key, value;  // no value: absorbed
  Inputs index;                          // query, key, weights

  Sequence(int64_t S, bool expanded, at::ScalarType dtype) : starts(doc_start({{S}})) {
    const auto leaf = [](at::IntArrayRef sizes, at::ScalarType type) {
      return at::ones(sizes, type).set_requires_grad(true);
    };
    query = leaf({1, S, kHeads, kWidth}, dtype);
    key = expanded ? leaf({1, S, kHeads, kWidth}, dtype) : leaf({1, S, kWidth}, dtype);
    if (expanded) value = leaf({1, S, kHeads, kWidth}, dtype);
    index = {leaf({1, S, kHeads, kWidth}, dtype), leaf({1, S, kWidth}, dtype),
             leaf({1, S, kHeads}, at::kFloat)};
  }

  Inputs leaves() const {
    Inputs all = {query, key, index[0], index[1], index[2]};
    if (value.defined()) all.push_back(value);
    return all;
  }
};

ops::AttentionOptions options(Kernel kernel) {
  return {.value_dim = kWidth, .return_statistics = true, .kernel = kernel};
}

void sparse_core(const Sequence& s, Kernel kernel) {
  const auto chosen =
      ops::lightning_indexer(s.index[0], s.index[1], s.index[2], s.starts, kTopK, kernel);
  auto with_sum = options(kernel);
  with_sum.return_head_sum = true;
  const auto r = ops::sparse_flash_attention(s.query, s.key, s.value, chosen.indices_BSK, with_sum);
  const auto loss =
      ops::sparse_indexer_kl_loss({s.index[0], s.index[1], s.index[2]}, chosen.indices_BSK,
                                  r.head_sum, kernel, chosen.scores_BSK);
  torch::autograd::grad({r.out_BSHV.sum() + loss}, s.leaves());
}

void dense_warmup(const Sequence& s, Kernel kernel) {
  const auto r = ops::flash_attention(s.query, s.key, s.value, s.starts, options(kernel));
  const auto loss = ops::dense_indexer_kl_loss({s.index[0], s.index[1], s.index[2]},
                                               {.query_BSHD = s.query.detach(),
                                                .key = s.key.detach(),
                                                .softmax_max = r.softmax_max,
                                                .softmax_sum = r.softmax_sum},
                                               s.starts, {.kernel = kernel});
  torch::autograd::grad({r.out_BSHV.sum() + loss}, s.leaves());
}

using Core = void (*)(const Sequence&, Kernel);

class FusedAllocations : public FusedKernels<std::tuple<at::ScalarType, bool>> {
 protected:
  // How the largest allocation grows from this length to twice that.
  static double growth(Core core, int64_t length, Kernel kernel) {
    const auto [dtype, expanded] = GetParam();
    const Sequence once(length, expanded, dtype), twice(2 * length, expanded, dtype);
    const auto largest = [&](const Sequence& s) {
      return static_cast<double>(largest_allocation([&] { core(s, kernel); }));
    };
    return largest(twice) / largest(once);
  }
};

TEST_P(FusedAllocations, SparseCoreGrowsLinearly) {
  EXPECT_LE(growth(sparse_core, 1024, Kernel::kFused), 2.05);
  EXPECT_GT(growth(sparse_core, 1024, Kernel::kReference), 3.5);  // the measure sees a square
}

TEST_P(FusedAllocations, DenseWarmupGrowsLinearly) {
  // The gradient of dense attention shares up to 32 MiB among blocks of queries: from 4096 keys on
  // it does not take more, where a number for each pair of tokens would take 64 MiB.
  EXPECT_LE(growth(dense_warmup, 4096, Kernel::kFused), 2.05);
}

INSTANTIATE_TEST_SUITE_P(Forms, FusedAllocations,
                         ::testing::Combine(::testing::Values(at::kFloat, at::kBFloat16),
                                            ::testing::Bool()));

}  // namespace
}  // namespace longhaul::testing
