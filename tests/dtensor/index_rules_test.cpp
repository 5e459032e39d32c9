// The rules of joining and indexing, by the operator table (rules_table.h).
#include "tests/dtensor/rules_table.h"

namespace longhaul::test {
namespace {

// Whole numbers from 0 to below `count`, some of them twice.
Tensor ids_of(const Tensor& x, int64_t count) {
  return x.abs().mul(2).clamp(0, static_cast<double>(count - 1)).to(at::kLong);
}

// Each position along `dim` once.
Tensor permutation_of(const Tensor& x, int64_t dim) { return std::get<1>(x.sort(dim)); }

using Indices = c10::List<std::optional<Tensor>>;

Indices at_dims(std::initializer_list<std::optional<Tensor>> indices) {
  Indices list;
  for (const auto& index : indices) list.push_back(index);
  return list;
}

std::vector<Case> joining_cases() {
  return {
      {"cat",
       {{4, 3}, {4, 2}},
       [](const Inputs& x) {
         return at::cat({x[0], x[1]}, 1);
       }},
      {"cat of one dim",
       {{4}, {3}},
       [](const Inputs& x) {
         return at::cat({x[0], x[1]});
       }},
      {"stack",
       {{4, 3}, {4, 3}},
       [](const Inputs& x) {
         return at::stack({x[0], x[1]}, 1);
       }},
      {"embedding",
       {{7, 4}, {2, 6}},
       [](const Inputs& x) { return at::embedding(x[0], ids_of(x[1], 7)); }},
  };
}

std::vector<Case> gather_cases() {
  return {
      {"gather", {{4, 6}, {4, 6}}, [](const Inputs& x) { return x[0].gather(1, ids_of(x[1], 6)); }},
      {"gather of more rows",
       {{4, 6}, {7, 6}},
       [](const Inputs& x) { return x[0].gather(0, ids_of(x[1], 4)); }},
      {"scatter_add",
       {{4, 6}, {4, 6}},
       [](const Inputs& x) { return at::zeros_like(x[0]).scatter_add(1, ids_of(x[1], 6), x[0]); }},
      {"scatter_add of fewer",
       {{4, 6}, {4, 3}},
       [](const Inputs& x) { return x[0].scatter_add(1, ids_of(x[1], 6), x[1]); }},
      {"scatter",
       {{4, 6}, {4, 6}},
       [](const Inputs& x) { return x[0].scatter(1, permutation_of(x[1], 1), x[1]); }},
      {"scatter of a number",
       {{4, 6}, {4, 6}},
       [](const Inputs& x) { return x[0].scatter(0, ids_of(x[1], 4), 2.5); }},
      {"scatter_reduce",
       {{4, 6}, {4, 6}},
       [](const Inputs& x) { return x[0].scatter_reduce(1, ids_of(x[1], 6), x[1], "amax"); },
       false},
  };
}

std::vector<Case> index_of_a_dim_cases() {
  return {
      {"index_select",
       {{6, 4}, {5}},
       [](const Inputs& x) { return x[0].index_select(0, ids_of(x[1], 6)); }},
      {"index_select that keeps the size",
       {{6, 4}, {6}},
       [](const Inputs& x) { return x[0].index_select(0, ids_of(x[1], 6)); }},
      {"index_add",
       {{6, 4}, {5}, {5, 4}},
       [](const Inputs& x) { return x[0].index_add(0, ids_of(x[1], 6), x[2], 2); }},
      {"index_copy",
       {{6, 4}, {6}, {6, 4}},
       [](const Inputs& x) { return x[0].index_copy(0, permutation_of(x[1], 0), x[2]); }},
      {"index_fill",
       {{6, 4}, {5}},
       [](const Inputs& x) { return x[0].index_fill(0, ids_of(x[1], 6), 0.5); }},
  };
}

std::vector<Case> index_cases() {
  return {
      {"index",
       {{6, 4}, {5}},
       [](const Inputs& x) { return x[0].index(at_dims({ids_of(x[1], 6)})); }},
      {"index of the second dim by a table",
       {{4, 6, 3}, {2, 5}},
       [](const Inputs& x) {
         return x[0].index(at_dims({std::nullopt, ids_of(x[1], 6)}));
       }},
      {"index that keeps the size",
       {{6, 4}, {6}},
       [](const Inputs& x) { return x[0].index(at_dims({ids_of(x[1], 6)})); }},
      {"index of two dims, broadcast",
       {{4, 6, 3}, {2, 1}, {5}},
       [](const Inputs& x) {
         return x[0].index(at_dims({ids_of(x[1], 4), ids_of(x[2], 6)}));
       }},
      {"index of two dims apart",
       {{4, 3, 6}, {5}, {5}},
       [](const Inputs& x) {
         return x[0].index(at_dims({ids_of(x[1], 4), std::nullopt, ids_of(x[2], 6)}));
       }},
  };
}

std::vector<Case> index_put_cases() {
  return {
      {"index_put",
       {{6, 4}, {6}, {6, 4}},
       [](const Inputs& x) { return x[0].index_put(at_dims({permutation_of(x[1], 0)}), x[2]); },
       false},  // for its gradient autograd makes zeros that are a plain tensor
      {"index_put adds",
       {{6, 4}, {5}, {5, 4}},
       [](const Inputs& x) { return x[0].index_put(at_dims({ids_of(x[1], 6)}), x[2], true); }},
      {"index_put adds what is broadcast",
       {{3, 6}, {5}, {5}},
       [](const Inputs& x) {
         return x[0].index_put(at_dims({std::nullopt, ids_of(x[1], 6)}), x[2], true);
       }},
      {"index_put in place",
       {{6, 4}, {6}, {6, 4}},
       [](const Inputs& x) {
         Tensor y = at::zeros_like(x[0]);
         y.index_put_(at_dims({ids_of(x[1], 6)}), x[2], true);
         return y + x[0];
       }},
      {"index_put by a mask",
       {{4, 6}},
       [](const Inputs& x) {
         return x[0].index_put(at_dims({x[0].gt(0)}), at::scalar_tensor(0.5, at::kDouble));
       },
       false},
  };
}

// In place on a tensor that no rank holds terms of: nothing can be written into those.
template <typename F>
Case in_place(const char* name, std::vector<std::vector<int64_t>> sizes, F f) {
  return {name, std::move(sizes), [f](const Inputs& x) {
            Tensor y = at::zeros_like(x[0]);
            f(y, x);
            return y + x[0];
          }};
}

std::vector<Case> in_place_cases() {
  return {
      in_place("scatter_", {{4, 6}, {4, 6}},
               [](Tensor& y, const Inputs& x) { y.scatter_(1, permutation_of(x[1], 1), x[1]); }),
      in_place("scatter_add_", {{4, 6}, {4, 6}},
               [](Tensor& y, const Inputs& x) { y.scatter_add_(1, ids_of(x[1], 6), x[1]); }),
      in_place("index_add_", {{6, 4}, {5}, {5, 4}},
               [](Tensor& y, const Inputs& x) { y.index_add_(0, ids_of(x[1], 6), x[2]); }),
      in_place("index_copy_", {{6, 4}, {6}, {6, 4}},
               [](Tensor& y, const Inputs& x) { y.index_copy_(0, permutation_of(x[1], 0), x[2]); }),
      in_place("index_fill_", {{6, 4}, {5}},
               [](Tensor& y, const Inputs& x) { y.index_fill_(0, ids_of(x[1], 6), 0.5); }),
  };
}

// Three inputs have thousands of placements on two axes.
void check_sample(const std::vector<Case>& cases) {
  ASSERT_FALSE(cases.empty());
  check_all(cases, {{"tp", 2}});
  check_all(cases, {{"tp", 3}}, 3);
  check_all(cases, {{"cp", 2}, {"tp", 2}}, 11);
}

TEST(IndexRules, Joining) { check_table(joining_cases()); }
TEST(IndexRules, GatherAndScatter) { check_table(gather_cases()); }
TEST(IndexRules, OfADim) { check_sample(index_of_a_dim_cases()); }
TEST(IndexRules, Index) { check_sample(index_cases()); }
TEST(IndexRules, IndexPut) { check_sample(index_put_cases()); }
TEST(IndexRules, InPlace) { check_sample(in_place_cases()); }

}  // namespace
}  // namespace longhaul::test
