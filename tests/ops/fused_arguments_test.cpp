// The C functions of the kernels at the edges of what they take: arguments that they refuse, with
// an error and no bytes of workspace, and sizes of 0.
#include <cfloat>
#include <cmath>

#include "tests/ops/fused_memory.h"

namespace longhaul::testing {
namespace {

class FusedArguments : public FusedKernels<longhaul_dtype> {
 protected:
  Arrays arrays_{1, 0};
};

longhaul_sparse_attention_args sparse_attention(longhaul_dtype dtype) {
  longhaul_sparse_attention_args a = {};
  a.dtype = dtype;
  a.B = 1, a.S = 2, a.L = 3;
  a.H = 4, a.D = 64, a.V = 32;
  a.K = 5;
  return a;
}

// Sizes that would divide by zero or overflow on the way to the workspace's size.
TEST_P(FusedArguments, NoWorkspaceForWhatIsRefused) {
  auto a = sparse_attention(GetParam());
  EXPECT_GT(longhaul_sparse_attention_workspace(&a), 0U);
  a.H = 0;
  EXPECT_EQ(longhaul_sparse_attention_workspace(&a), 0U);
  EXPECT_STREQ(longhaul_sparse_attention(&a, nullptr), "H: expected 1 to 128 heads, got 0");
  a = sparse_attention(GetParam());
  a.S = INT64_MIN;
  EXPECT_EQ(longhaul_sparse_attention_workspace(&a), 0U);
  EXPECT_STREQ(longhaul_sparse_attention(&a, nullptr),
               "S: expected at least 0, got -9223372036854775808");

  longhaul_moe_gating_top_k_args gating = {};
  gating.T = gating.k = 1;
  gating.E = 4;
  EXPECT_EQ(longhaul_moe_gating_top_k_workspace(&gating), 0U);
  EXPECT_STREQ(longhaul_moe_gating_top_k(&gating, nullptr),
               "n_group: expected a divisor of 4 (E), got 0");
}

// By head_sum one kernel tells whether it computes the loss or the softmax.
TEST_P(FusedArguments, HeadSumIsOfTheLossAlone) {
  longhaul_dense_indexer_kl_loss_args a = {};
  a.dtype = GetParam();
  a.H = 2;
  a.D = 32;
  a.softmax_max = a.softmax_sum = arrays_.floats(0);
  EXPECT_STREQ(longhaul_dense_indexer_kl_loss(&a, nullptr),
               "head_sum: expected an array for the loss, got null");
  a.head_sum = arrays_.floats(0);
  EXPECT_STREQ(longhaul_dense_indexer_softmax(&a, nullptr),
               "head_sum: expected null for the softmax, got an array");
}

// C lets any number stand where the dtype does.
TEST(FusedDtypes, OthersAreRefused) {
  auto a = sparse_attention(LONGHAUL_FLOAT32);
  longhaul_array array = {.dtype = LONGHAUL_FLOAT32, .n = 0, .data = nullptr};
  const longhaul_sum_of_squares_args squares = {.count = 1, .arrays = &array, .sum = nullptr};
  for (const int32_t other : {2, -1}) {
    std::memcpy(&a.dtype, &other, sizeof other);
    std::memcpy(&array.dtype, &other, sizeof other);
    const std::string text = "dtype: expected LONGHAUL_FLOAT32 (0) or LONGHAUL_BFLOAT16 (1), got " +
                             std::to_string(other);
    const char* expected = text.c_str();
    EXPECT_EQ(longhaul_sparse_attention_workspace(&a), 0U);
    EXPECT_STREQ(longhaul_sparse_attention(&a, nullptr), expected);
    EXPECT_STREQ(longhaul_sum_of_squares(&squares, nullptr), expected);
  }
}

// Without a query the keys' gradients are 0.
TEST_P(FusedArguments, DenseAttentionWithoutQueries) {
  longhaul_flash_attention_grad_args g = {};
  auto& a = g.forward;
  a.dtype = GetParam();
  a.B = 1, a.L = 3;
  a.H = a.key_heads = 2;
  a.D = 64, a.V = 32;
  a.key = arrays_.numbers(a.dtype, 2 * 3 * 64);
  a.value = arrays_.numbers(a.dtype, 2 * 3 * 32);
  g.d_key = arrays_.replaced(a.dtype, 2 * 3 * 64);
  g.d_value = arrays_.replaced(a.dtype, 2 * 3 * 32);
  arrays_.run(longhaul_flash_attention, longhaul_flash_attention_workspace, a);
  arrays_.run(longhaul_flash_attention_grad, longhaul_flash_attention_grad_workspace, g);
  const std::string results = arrays_.results();
  EXPECT_EQ(results, std::string(results.size(), '\0'));
}

// Without a query nothing is added to the keys' gradients.
TEST_P(FusedArguments, DenseIndexerLossWithoutQueries) {
  longhaul_dense_indexer_kl_loss_args a = {};
  a.dtype = GetParam();
  a.L = 3;
  a.H = 2;
  a.D = 32;
  a.key = arrays_.numbers(a.dtype, 3 * 32);
  a.head_sum = arrays_.floats(0);
  a.d_query = arrays_.result(a.dtype, 0);
  a.d_key = static_cast<float*>(arrays_.replaced(LONGHAUL_FLOAT32, 3 * 32));
  a.d_weights = arrays_.result_floats(0);
  const std::string before = arrays_.results();
  arrays_.run(longhaul_dense_indexer_kl_loss, longhaul_dense_indexer_kl_loss_workspace, a);
  EXPECT_EQ(arrays_.results(), before);
}

// Queries without a key.
TEST_P(FusedArguments, SparseAttentionWithoutKeys) {
  longhaul_sparse_attention_grad_args g = {};
  auto& a = g.forward;
  a = sparse_attention(GetParam());
  a.L = 0;
  a.query = arrays_.numbers(a.dtype, 2 * 4 * 64);
  a.key = arrays_.numbers(a.dtype, 0);
  a.indices = arrays_.indices(2, a.K, 0);
  a.out = arrays_.replaced(a.dtype, 2 * 4 * 32);
  a.softmax_max = arrays_.result_floats(2 * 4);
  a.softmax_sum = arrays_.result_floats(2 * 4);
  g.d_out = arrays_.numbers(a.dtype, 2 * 4 * 32);
  g.d_query = arrays_.replaced(a.dtype, 2 * 4 * 64);
  g.d_key = arrays_.result(a.dtype, 0);
  arrays_.run(longhaul_sparse_attention, longhaul_sparse_attention_workspace, a);
  arrays_.run(longhaul_sparse_attention_grad, longhaul_sparse_attention_grad_workspace, g);
  const std::string results = arrays_.results();
  EXPECT_EQ(results, std::string(results.size(), '\0'));
}

// Logits that are all the lowest number that there is, as if every word were masked out by it.
TEST_P(FusedArguments, CrossEntropyOfTheLowestLogits) {
  const int64_t V = 40, label = 7;
  float loss = 0;
  longhaul_cross_entropy_args a = {};
  a.dtype = GetParam();
  a.gradient = 1;
  a.rows = 1;
  a.V = a.stride = V;
  const float lowest = a.dtype == LONGHAUL_FLOAT32 ? -FLT_MAX : -0x1.fep127F;
  a.logits = arrays_.numbers(a.dtype, V, lowest, lowest);
  a.labels = &label;
  a.loss = &loss;
  EXPECT_STREQ(longhaul_cross_entropy(&a), nullptr);
  EXPECT_NEAR(loss, std::log(40.0), 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedArguments,
                         ::testing::Values(LONGHAUL_FLOAT32, LONGHAUL_BFLOAT16));

}  // namespace
}  // namespace longhaul::testing
