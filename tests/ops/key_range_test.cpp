// The attention operators on some of a sequence's queries and all of its keys: the queries of a
// sequence dealt into parts give what they give together, and the gradients of the keys add up.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"
#include "tests/ops/fused_operator.h"

namespace longhaul::testing {
namespace {

using ops::Kernel;
using ::testing::HasSubstr;

constexpr int64_t kHeads = 3, kWidth = 64, kValues = 32;
constexpr double kScale = 0.3;

// Parts of consecutive queries, by first query and number.
using Part = std::vector<std::pair<int64_t, int64_t>>;

// A sequence and how its queries are dealt out; no part of `deal`: all queries at once.
struct Case {
  const char* name;
  std::vector<std::vector<int64_t>> documents;
  std::vector<Part> deal;

  at::Tensor starts() const { return doc_start(documents); }
  int64_t slots() const { return starts().size(1); }
};

const Case kCases[] = {
    {"two halves", {{12}}, {{{0, 6}}, {{6, 6}}}},
    {"head and tail", {{16}, {16}}, {{{0, 4}, {12, 4}}, {{4, 4}, {8, 4}}}},
    {"documents over the edges", {{5, 1, 9, -1}, {-3, 13, 0}}, {{{0, 4}, {12, 4}}, {{4, 8}}}},
    {"a part of padding", {{4, -8}}, {{{0, 6}}, {{6, 6}}}},
    {"tail before head", {{20}}, {{{15, 5}, {0, 5}}, {{10, 5}, {5, 5}}}},
    {"single queries", {{2, 3}}, {{{4, 1}}, {{0, 1}, {3, 1}}, {{2, 1}, {1, 1}}}},
    {"several blocks of queries", {{90, 210, 20}}, {{{0, 80}, {240, 80}}, {{80, 160}}}},
};

at::Tensor positions_of(const Part& part) {
  std::vector<at::Tensor> positions;
  for (const auto& [first, count] : part) {
    positions.push_back(at::arange(first, first + count, at::kLong));
  }
  return at::cat(positions);
}

// What an operator reads of one part of the queries; `starts` belong to all keys.
struct Queries {
  at::Tensor positions;
  at::Tensor starts;
  Part runs;

  at::Tensor of(const at::Tensor& x) const { return x.index_select(1, positions); }
  ops::KeyRange range() const {
    const auto first = of(starts);
    return {first, positions.expand_as(first).contiguous()};
  }
};

using PartOperator = std::function<at::Tensor(const Inputs&, const Queries&, Kernel)>;

// f by parts, put together in the order of the queries (or added up, where f gives a number).
at::Tensor by_parts(const Case& c, const PartOperator& f, const Inputs& x, Kernel kernel) {
  std::vector<at::Tensor> results, positions;
  for (const auto& part : c.deal) {
    positions.push_back(positions_of(part));
    results.push_back(f(x, {positions.back(), c.starts(), part}, kernel));
  }
  if (results[0].dim() == 0) return at::stack(results).sum();
  return at::cat(results, 1).index_select(1, at::cat(positions).argsort());
}

at::Tensor all_at_once(const Case& c, const PartOperator& f, const Inputs& x) {
  const Part whole = {{0, c.slots()}};
  return f(x, {positions_of(whole), c.starts(), whole}, Kernel::kReference);
}

// Random visible keys of each query, ascending, with gaps.
at::Tensor chosen_keys(const Case& c) {
  const auto visible = ops::visible_mask(c.starts());
  return ops::mask_to_indices(visible.logical_and(normal(visible.sizes(), 6) > -0.3), c.slots());
}

struct Named {
  const char* name;
  PartOperator f;
  Inputs operands;
};

at::Tensor dense(const Inputs& x, const Queries& q, Kernel kernel) {
  const auto value = x.size() > 2 ? x[2] : at::Tensor();
  return ops::flash_attention(q.of(x[0]), x[1], value, q.range(),
                              {.scale = kScale, .value_dim = kValues, .kernel = kernel})
      .out_BSHV;
}

PartOperator sparse(const Case& c) {
  return [chosen = chosen_keys(c)](const Inputs& x, const Queries& q, Kernel kernel) {
    const auto value = x.size() > 2 ? x[2] : at::Tensor();
    return ops::sparse_flash_attention(q.of(x[0]), x[1], value, q.of(chosen),
                                       {.scale = kScale, .value_dim = kValues, .kernel = kernel})
        .out_BSHV;
  };
}

PartOperator sparse_loss(const Case& c) {
  const auto chosen = chosen_keys(c);
  const auto head_sum = normal(chosen.sizes(), 11, 1, at::kFloat).exp() * (chosen >= 0);
  return [=](const Inputs& x, const Queries& q, Kernel kernel) {
    return ops::sparse_indexer_kl_loss({q.of(x[0]), x[1], q.of(x[2])}, q.of(chosen), q.of(head_sum),
                                       kernel);
  };
}

// Of a dense attention with fixed operands.
PartOperator dense_loss(const Case& c, at::ScalarType dtype) {
  const int64_t B = c.starts().size(0), S = c.slots();
  const auto query = normal({B, S, kHeads, kWidth}, 21, 1, dtype);
  const auto key = normal({B, S, kWidth}, 22, 1, dtype);
  return [=](const Inputs& x, const Queries& q, Kernel kernel) {
    const auto type = kernel == Kernel::kReference ? x[0].scalar_type() : dtype;
    const auto own = q.of(query).to(type), keys = key.to(type);
    const auto attended = ops::flash_attention(
        own, keys, {}, q.range(),
        {.scale = kScale, .value_dim = kValues, .return_statistics = true, .kernel = kernel});
    return ops::dense_indexer_kl_loss({q.of(x[0]), x[1], q.of(x[2])},
                                      {.query_BSHD = own,
                                       .key = keys,
                                       .softmax_max = attended.softmax_max,
                                       .softmax_sum = attended.softmax_sum,
                                       .scale = kScale},
                                      q.range(), {.kernel = kernel});
  };
}

std::vector<Named> operators(const Case& c, at::ScalarType dtype) {
  const int64_t B = c.starts().size(0), S = c.slots();
  const auto make = [&](at::IntArrayRef sizes, uint64_t seed) {
    return normal(sizes, seed, 1, dtype);
  };
  const Inputs shared = {make({B, S, kHeads, kWidth}, 1), make({B, S, kWidth}, 2)};
  const Inputs by_head = {make({B, S, kHeads, kWidth}, 1), make({B, S, kHeads, kWidth}, 2),
                          make({B, S, kHeads, kValues}, 3)};
  const Inputs indexer = {make({B, S, kHeads, 32}, 4), make({B, S, 32}, 5),
                          normal({B, S, kHeads}, 6, 0.3, at::kFloat)};
  return {{"dense, absorbed", dense, shared},
          {"dense, expanded", dense, by_head},
          {"sparse, absorbed", sparse(c), shared},
          {"sparse, expanded", sparse(c), by_head},
          {"sparse indexer loss", sparse_loss(c), indexer},
          {"dense indexer loss", dense_loss(c, dtype), indexer}};
}

Inputs in_double(const Inputs& operands) {
  Inputs wide;
  for (const auto& x : operands) wide.push_back(x.to(at::kDouble));
  return wide;
}

double largest_difference(const at::Tensor& actual, const at::Tensor& expected) {
  return (actual - expected).abs().max().item<double>();
}

// Values and gradients are of the order of 1.
TEST(KeyRange, PartsOfTheQueriesGiveTheWhole) {
  for (const auto& c : kCases) {
    for (const auto& [name, f, operands] : operators(c, at::kDouble)) {
      SCOPED_TRACE(::testing::Message() << name << ", " << c.name);
      const Inputs wide = in_double(operands);
      const auto whole = evaluate([&](const Inputs& x) { return all_at_once(c, f, x); }, wide);
      const auto parts =
          evaluate([&](const Inputs& x) { return by_parts(c, f, x, Kernel::kReference); }, wide);
      EXPECT_LT(largest_difference(parts.value, whole.value), 1e-11);
      for (size_t i = 0; i < wide.size(); ++i) {
        EXPECT_LT(largest_difference(parts.gradients[i], whole.gradients[i]), 1e-11) << i;
      }
    }
  }
}

TEST(KeyRange, WithoutLastKeysIsCausal) {
  const auto starts = kCases[2].starts();
  const auto in_order = at::arange(starts.size(1), at::kLong).expand_as(starts);
  EXPECT_TRUE(at::equal(ops::visible_mask(ops::KeyRange(starts, in_order), starts.size(1)),
                        ops::visible_mask(starts)));
  EXPECT_TRUE(at::equal(ops::KeyRange(starts).last(), in_order));
}

TEST(KeyRange, BadInput) {
  const auto starts = at::zeros({1, 4}, at::kLong);
  const auto call = [&](int64_t keys, const ops::KeyRange& range) {
    return message_of([&] {
      ops::flash_attention(at::zeros({1, 4, 2, 8}), at::zeros({1, keys, 8}), {}, range,
                           {.value_dim = 4});
    });
  };
  EXPECT_EQ(call(4, starts), "");
  EXPECT_THAT(call(9, starts), HasSubstr("9 keys, expected one for each of 4 queries"));
  EXPECT_THAT(call(9, {starts, at::zeros({1, 5}, at::kLong)}), HasSubstr("expected [1 x 4]"));
  EXPECT_THAT(message_of([&] { ops::KeyRange(starts).of_queries(3, 3); }),
              HasSubstr("queries: expected some of 0 to 3, got 3 to 5"));
}

class FusedKeyRange : public FusedOperator {};

// Against the fp64 reference on the whole sequence.
TEST_P(FusedKeyRange, PartsOfTheQueriesGiveTheWhole) {
  // As in the operators' own tests, and once more the rounding of the keys' gradients, which each
  // part adds to.
  const double limit = dtype() == at::kFloat ? 6e-6 : 1.2e-2;
  for (const auto& c : kCases) {
    for (const auto& [name, f, narrow] : operators(c, dtype())) {
      SCOPED_TRACE(::testing::Message() << name << ", " << c.name);
      const Operator both = [&c, f = f](const Inputs& x, Kernel kernel) {
        return kernel == Kernel::kReference ? all_at_once(c, f, x) : by_parts(c, f, x, kernel);
      };
      const auto expected = evaluated(both, in_double(narrow), Kernel::kReference);
      const auto actual = evaluated(both, narrow, Kernel::kFused);
      EXPECT_LT(frobenius(actual.value, expected.value), limit);
      for (size_t i = 0; i < narrow.size(); ++i) {
        EXPECT_LT(frobenius(actual.gradients[i], expected.gradients[i]), limit) << i;
      }
    }
  }
}

// The same selection for each query, bit by bit: small integers tie all the time.
TEST_P(FusedKeyRange, SelectionOfParts) {
  for (const auto& c : kCases) {
    const auto starts = c.starts();
    const int64_t B = starts.size(0), S = c.slots(), K = 5;
    const auto small = [](at::IntArrayRef sizes, uint64_t seed) {
      return (integers(sizes, 3, seed) - 1).to(dtype());
    };
    const auto query = small({B, S, kHeads, 32}, 1), key = small({B, S, 32}, 2);
    const auto weights = small({B, S, kHeads}, 3).to(at::kFloat) * 0.5;
    const auto whole = ops::lightning_indexer(query.to(at::kDouble), key.to(at::kDouble),
                                              weights.to(at::kDouble), starts, K);
    for (const auto kernel : {Kernel::kReference, Kernel::kFused}) {
      for (const auto& part : c.deal) {
        const Queries q = {positions_of(part), starts, part};
        const auto own =
            ops::lightning_indexer(q.of(query), key, q.of(weights), q.range(), K, kernel);
        EXPECT_TRUE(at::equal(own.indices_BSK, q.of(whole.indices_BSK))) << c.name;
        EXPECT_TRUE(at::equal(own.scores_BSK.to(at::kDouble), q.of(whole.scores_BSK))) << c.name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, FusedKeyRange, ::testing::Values(at::kFloat, at::kBFloat16),
                         [](const auto& info) { return c10::toString(info.param); });

}  // namespace
}  // namespace longhaul::testing
