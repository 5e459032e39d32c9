// Gradients of the fused kernels by central differences: of the fp64 reference, and of the fused
// forward pass itself, for the instruction set that LONGHAUL_ISA names (ctest runs this once for
// each). Selections and the indexer's target or the attention that makes it are held.
#include <gtest/gtest.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/flash_attention/flash_attention.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/rms_norm/rms_norm.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"
#include "tests/ops/fused_kernels.h"
#include "tests/support/gradcheck.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;

// Of fp64 operands in the reference, else in fp32 in the fused kernel.
using Operator = std::function<at::Tensor(const Inputs&, Kernel)>;

class FusedFiniteDifferences : public FusedKernels<int> {
 protected:
  // fp32 accumulation; the differences of the reference themselves are right to 1e-8.
  static constexpr double kLimit = 3e-6;

  // The largest difference of the fused gradients from central differences of the reference, as a
  // share of each operand's largest gradient.
  static void expect_differences_of_reference(const Operator& f, const Inputs& operands,
                                              const Inputs& gradients) {
    const Function reference = [&](const Inputs& x) { return f(x, Kernel::kReference); };
    for (size_t which = 0; which < operands.size(); ++which) {
      const auto flat = gradients[which].to(at::kDouble).reshape(-1);
      const int64_t n = flat.numel(), stride = std::max<int64_t>(1, n / 60);
      const double scale = flat.abs().max().item<double>();
      ASSERT_GT(scale, 0) << which;
      for (int64_t i = 0; i < n; i += stride) {
        EXPECT_NEAR(central_difference(reference, operands, which, i, 1e-5), flat[i].item<double>(),
                    kLimit * scale)
            << "operand " << which << ", element " << i;
      }
    }
  }

  // The change of the fused value itself along each gradient, where it is largest: kinks and the
  // rounding of fp32 are small beside it.
  static void expect_differences_of_fused(const Operator& f, const Inputs& operands,
                                          const Inputs& gradients) {
    constexpr double kStep = 1.0 / 64;
    for (size_t which = 0; which < operands.size(); ++which) {
      const auto gradient = gradients[which].to(at::kDouble);
      const double norm = gradient.norm().item<double>();
      const auto value_at = [&](double offset) {
        Inputs x;
        for (const auto& operand : operands) x.push_back(operand.to(at::kFloat));
        x[which] = (operands[which] + gradient * (offset / norm)).to(at::kFloat);
        return weighed(f(x, Kernel::kFused).to(at::kDouble)).item<double>();
      };
      EXPECT_NEAR((value_at(kStep) - value_at(-kStep)) / (2 * kStep) / norm, 1, 1e-3) << which;
    }
  }

  // Both, of the fused gradients at these operands.
  static void expect_differences(const Operator& f, const Inputs& operands) {
    Inputs x;
    for (const auto& operand : operands) x.push_back(operand.to(at::kFloat));
    const auto d = evaluate([&](const Inputs& in) { return f(in, Kernel::kFused); }, x).gradients;
    expect_differences_of_reference(f, operands, d);
    expect_differences_of_fused(f, operands, d);
  }

  // Exact in fp32.
  static at::Tensor exact(at::IntArrayRef sizes, uint64_t seed, double std = 1) {
    return normal(sizes, seed, std, at::kFloat).to(at::kDouble);
  }
};

constexpr int64_t kS = 40, kHeads = 5, kWidth = 32;

Inputs index_operands(const std::function<at::Tensor(at::IntArrayRef, uint64_t)>& make) {
  return {make({1, kS, kHeads, kWidth}, 1), make({1, kS, kWidth}, 2), make({1, kS, kHeads}, 3)};
}

// Distinct keys with gaps, the same for every operand.
at::Tensor held_selection() {
  const auto visible = ops::visible_mask(doc_start({{23, 17}}));
  const auto all = ops::mask_to_indices(visible.logical_and(normal({1, kS, kS}, 6) > -0.5), kS);
  return at::where(normal(all.sizes(), 7) > 1, at::full_like(all, -1), all);
}

at::Tensor scores_at(const Inputs& x, const at::Tensor& chosen) {
  return ops::indexer_scores(x[0], x[1], x[2])
      .gather(2, chosen.to(at::kLong).clamp_min(0))
      .masked_fill(chosen < 0, 0);
}

TEST_P(FusedFiniteDifferences, LightningIndexerGrad) {
  const auto operands =
      index_operands([](auto sizes, uint64_t seed) { return exact(sizes, seed); });
  const auto chosen = held_selection();
  const auto d_scores = normal(chosen.sizes(), 4711).masked_fill(chosen < 0, 0);
  Inputs x;
  for (const auto& operand : operands) x.push_back(operand.to(at::kFloat));
  const auto d = ops::lightning_indexer_grad({x[0], x[1], x[2]}, chosen, d_scores.to(at::kFloat),
                                             Kernel::kFused);
  expect_differences_of_reference([&](const Inputs& in, Kernel) { return scores_at(in, chosen); },
                                  operands, {d.query_BSHD, d.key_BSD, d.weights_BSH});
}

// With as many keys as there are the selection is held, and the scores are what it returns.
TEST_P(FusedFiniteDifferences, LightningIndexerScores) {
  const auto starts = doc_start({{23, 17}});
  const auto operands =
      index_operands([](auto sizes, uint64_t seed) { return exact(sizes, seed); });
  const auto all_keys = ops::mask_to_indices(ops::visible_mask(starts), kS);
  const Operator scores = [&](const Inputs& in, Kernel kernel) {
    return ops::lightning_indexer(in[0], in[1], in[2], starts, kS, kernel).scores_BSK;
  };
  Inputs x;
  for (const auto& operand : operands) x.push_back(operand.to(at::kFloat));
  const auto d_scores = normal(all_keys.sizes(), 4711).to(at::kFloat);
  const auto d =
      ops::lightning_indexer_grad({x[0], x[1], x[2]}, all_keys, d_scores, Kernel::kFused);
  expect_differences_of_fused(scores, operands, {d.query_BSHD, d.key_BSD, d.weights_BSH});
}

// Absorbed (values are the first columns of a key that heads share) and expanded.
TEST_P(FusedFiniteDifferences, SparseAndDenseAttention) {
  constexpr int64_t kValues = 32, kColumns = 64;
  const auto query = exact({1, kS, kHeads, kColumns}, 1);
  const Inputs forms[] = {
      {query, exact({1, kS, kColumns}, 2)},
      {query, exact({1, kS, kHeads, kColumns}, 2), exact({1, kS, kHeads, kValues}, 3)}};
  const auto chosen = held_selection(), starts = doc_start({{23, 17}});
  const auto attend = [&](const Inputs& x, Kernel kernel, bool sparse) {
    const auto value = x.size() > 2 ? x[2] : at::Tensor();
    const ops::AttentionOptions options{.scale = 0.2, .value_dim = kValues, .kernel = kernel};
    return sparse ? ops::sparse_flash_attention(x[0], x[1], value, chosen, options).out_BSHV
                  : ops::flash_attention(x[0], x[1], value, starts, options).out_BSHV;
  };
  for (const auto& operands : forms) {
    for (const bool sparse : {true, false}) {
      SCOPED_TRACE(::testing::Message()
                   << (sparse ? "sparse, " : "dense, ") << operands.size() << " operands");
      expect_differences([&](const Inputs& x, Kernel kernel) { return attend(x, kernel, sparse); },
                         operands);
    }
  }
}

// The attention's state is held.
TEST_P(FusedFiniteDifferences, DenseIndexerLoss) {
  const auto starts = doc_start({{23, 17}});
  const auto query = exact({1, kS, kHeads, kWidth}, 4, 0.5);
  const auto key = exact({1, kS, kHeads, kWidth}, 5), value = exact({1, kS, kHeads, kWidth}, 6);
  constexpr double kScale = 0.3;
  const auto attention =
      ops::flash_attention(query, key, value, starts, {.scale = kScale, .return_statistics = true});
  const Operator loss = [&](const Inputs& x, Kernel kernel) {
    const auto type = x[0].scalar_type();
    return ops::dense_indexer_kl_loss({x[0], x[1], x[2]},
                                      {.query_BSHD = query.to(type),
                                       .key = key.to(type),
                                       .softmax_max = attention.softmax_max.to(type),
                                       .softmax_sum = attention.softmax_sum.to(type),
                                       .scale = kScale},
                                      starts, {.kernel = kernel});
  };
  expect_differences(
      loss, index_operands([](auto sizes, uint64_t seed) { return exact(sizes, seed, 0.5); }));
}

TEST_P(FusedFiniteDifferences, SparseIndexerLoss) {
  const auto operands =
      index_operands([](auto sizes, uint64_t seed) { return exact(sizes, seed, 0.5); });
  const auto chosen = held_selection();
  const auto head_sum = exact(chosen.sizes(), 9).exp().masked_fill(chosen < 0, 0);
  const Operator loss = [&](const Inputs& x, Kernel kernel) {
    return ops::sparse_indexer_kl_loss({x[0], x[1], x[2]}, chosen, head_sum.to(x[0].scalar_type()),
                                       kernel);
  };
  expect_differences(loss, operands);
}

TEST_P(FusedFiniteDifferences, AddRmsNorm) {
  const Inputs operands = {exact({7, 129}, 1), exact({7, 129}, 2), exact({129}, 3)};
  const Operator norm = [](const Inputs& x, Kernel kernel) {
    const auto result = ops::rms_norm_add(x[0], x[1], x[2], 1e-6, kernel);
    return at::cat({result.y, result.sum}, -1);
  };
  expect_differences(norm, operands);
}

INSTANTIATE_TEST_SUITE_P(Fp32, FusedFiniteDifferences, ::testing::Values(0));

}  // namespace
}  // namespace longhaul::testing
