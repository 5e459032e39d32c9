// The rules of pointwise operators, views, products, reductions and new tensors, by the operator
// table; those of indexing are in index_rules_test.cpp.
#include "tests/dtensor/rules_table.h"

namespace longhaul::test {
namespace {

// Numbers that do not divide by 2 or 3 beside numbers that do.
std::vector<Case> pointwise_cases() {
  return {
      {"add", {{4, 5}, {4, 5}}, [](const Inputs& x) { return x[0] + x[1]; }},
      {"add broadcast", {{4, 5}, {5}}, [](const Inputs& x) { return x[0] + x[1]; }},
      {"add broadcast 1", {{4, 5}, {4, 1}}, [](const Inputs& x) { return x[0] + x[1]; }},
      {"sub alpha", {{4, 5}, {4, 5}}, [](const Inputs& x) { return at::sub(x[0], x[1], 3); }},
      {"add number", {{4, 5}}, [](const Inputs& x) { return x[0] + 2; }},
      {"mul", {{4, 5}, {4, 5}}, [](const Inputs& x) { return x[0] * x[1]; }},
      {"mul broadcast", {{4, 1, 5}, {3, 1}}, [](const Inputs& x) { return x[0] * x[1]; }},
      {"mul number", {{4, 5}}, [](const Inputs& x) { return x[0] * 2.5; }},
      {"div", {{4, 5}, {4, 5}}, [](const Inputs& x) { return x[0] / (x[1].abs() + 1); }},
      {"neg", {{7}}, [](const Inputs& x) { return -x[0]; }},
      {"silu", {{4, 5}}, [](const Inputs& x) { return at::silu(x[0]); }},
      {"sigmoid", {{4, 5}}, [](const Inputs& x) { return at::sigmoid(x[0]); }},
      {"where",
       {{4, 5}, {4, 5}},
       [](const Inputs& x) { return at::where(x[0].gt(0), x[0], x[1]); }},
      {"masked_fill", {{4, 5}}, [](const Inputs& x) { return x[0].masked_fill(x[0].gt(0), 0.5); }},
      {"clamp", {{4, 5}}, [](const Inputs& x) { return x[0].clamp(-0.5, 0.5); }},
      {"to float and back",
       {{4, 5}},
       [](const Inputs& x) { return x[0].to(at::kFloat).to(at::kDouble); }},
      {"maximum", {{4, 5}, {5}}, [](const Inputs& x) { return at::maximum(x[0], x[1]); }},
      {"powers", {{4, 5}}, [](const Inputs& x) { return x[0].pow(3) + x[0].abs().sqrt(); }},
      {"remainder",
       {{4, 5}},
       [](const Inputs& x) { return x[0].remainder(0.75) + x[0].floor() + x[0].sign(); }},
      {"addcmul",
       {{4, 5}, {4, 5}, {5}},
       [](const Inputs& x) { return at::addcmul(x[0], x[1], x[2], 0.5); }},
      {"lerp", {{4, 5}, {4, 5}}, [](const Inputs& x) { return at::lerp(x[0], x[1], 0.25); }},
      {"gelu, tanh", {{4, 5}}, [](const Inputs& x) { return at::gelu(x[0]) + at::tanh(x[0]); }},
      {"logarithms",
       {{4, 5}},
       [](const Inputs& x) { return (x[0].square() + 1).log() + x[0].square().log1p(); }},
      {"fill", {{4, 5}}, [](const Inputs& x) { return at::zeros_like(x[0]).fill_(2) + x[0]; }},
      {"square of exp", {{3, 2}}, [](const Inputs& x) { return x[0].exp().square(); }},
      {"in place",
       {{4, 5}, {4, 5}},
       [](const Inputs& x) {
         Tensor y = x[0] * 2;
         y.add_(x[0]);
         return y * x[1];
       }},
      {"product in place",
       {{4, 5}, {4, 5}},
       [](const Inputs& x) {
         Tensor y = x[0].clone();
         y.mul_(x[1]);
         return y + x[1];
       }},
  };
}

// What is no number is made one; nothing flows back.
Tensor number(const Tensor& truth) { return truth.to(at::kDouble); }

std::vector<Case> comparison_cases() {
  return {
      {"gt and lt",
       {{4, 5}, {4, 5}},
       [](const Inputs& x) { return number(x[0].gt(0).logical_and(x[1].lt(x[0]))); },
       false},
      {"not, or, xor",
       {{4, 5}, {5}},
       [](const Inputs& x) {
         return number(x[0].ge(0).logical_not().logical_or(x[1].ne(0)).logical_xor(x[0].le(x[1])));
       },
       false},
      {"bitwise",
       {{4, 5}, {4, 5}},
       [](const Inputs& x) {
         return number(x[0].gt(0).bitwise_and(x[1].gt(0)).bitwise_or(x[0].lt(-1)).bitwise_not());
       },
       false},
      {"isfinite", {{4, 5}}, [](const Inputs& x) { return number((x[0] / 0).isfinite()); }, false},
  };
}

std::vector<Case> view_cases() {
  return {
      {"view join",
       {{4, 3, 5}},
       [](const Inputs& x) {
         return x[0].reshape({12, 5}) * 2;
       }},
      {"view split",
       {{12, 5}},
       [](const Inputs& x) {
         return x[0].view({6, 2, 5});
       }},
      {"view split uneven",
       {{10, 5}},
       [](const Inputs& x) {
         return x[0].view({5, 2, 5});
       }},
      {"view with ones",
       {{6, 5}},
       [](const Inputs& x) {
         return x[0].view({1, 6, 1, 5});
       }},
      {"view heads",
       {{2, 3, 12}},
       [](const Inputs& x) {
         return x[0].view({2, 3, 6, 2});
       }},
      {"transpose", {{4, 3, 5}}, [](const Inputs& x) { return x[0].transpose(0, 2); }},
      {"transpose, reshape",
       {{4, 3, 6}},
       [](const Inputs& x) {
         return x[0].transpose(0, 1).reshape({3, 24});
       }},
      {"permute",
       {{4, 3, 5}},
       [](const Inputs& x) {
         return x[0].permute({2, 0, 1});
       }},
      {"t", {{4, 3}}, [](const Inputs& x) { return x[0].t(); }},
      {"unsqueeze", {{4, 3}}, [](const Inputs& x) { return x[0].unsqueeze(1); }},
      {"squeeze", {{4, 1, 3}}, [](const Inputs& x) { return x[0].squeeze(1); }},
      {"expand",
       {{4, 1, 3}},
       [](const Inputs& x) {
         return x[0].expand({2, 4, 5, 3});
       }},
      {"squeeze all", {{4, 1, 3}}, [](const Inputs& x) { return x[0].squeeze(); }},
      {"squeeze what stays", {{2, 3}}, [](const Inputs& x) { return x[0].squeeze(0) * 2; }},
      {"sum of transposed, viewed",
       {{4, 6}, {4, 6}},
       [](const Inputs& x) { return (x[0].t() + x[1].t()).t().view({24}); }},
      {"slice", {{6, 5}}, [](const Inputs& x) { return x[0].slice(0, 1, 5, 2); }},
      {"narrow last", {{6, 5}}, [](const Inputs& x) { return x[0].narrow(-1, 1, 3); }},
      {"select", {{6, 5, 4}}, [](const Inputs& x) { return x[0].select(1, 2); }},
      {"split",
       {{6, 5}},
       [](const Inputs& x) {
         const auto parts = x[0].split_with_sizes({2, 3}, 1);
         return at::cat({parts[1] * 2, parts[0]}, 1);
       }},
      {"split of equal parts",
       {{6, 4}},
       [](const Inputs& x) {
         const auto parts = x[0].split(3, 0);
         return parts[0] * parts[1];
       }},
      {"unbind",
       {{3, 4}},
       [](const Inputs& x) {
         const auto rows = x[0].unbind(0);
         return rows[0] * rows[1] + rows[2];
       }},
      {"slice of all", {{6, 5}}, [](const Inputs& x) { return x[0].slice(1) * 2; }},
      {"slice of one dim", {{7}}, [](const Inputs& x) { return x[0].slice(0, 2, 6) * 2; }},
      {"view split of one dim",
       {{9}},
       [](const Inputs& x) {
         return x[0].view({3, 3}) * 2;
       }},
      {"contiguous",
       {{4, 3, 5}},
       [](const Inputs& x) {
         return x[0].transpose(1, 2).contiguous().view({4, 15});
       }},
      {"detach", {{4, 3}}, [](const Inputs& x) { return x[0].detach(); }, false},
  };
}

std::vector<Case> product_cases() {
  return {
      {"mm", {{4, 6}, {6, 5}}, [](const Inputs& x) { return at::mm(x[0], x[1]); }},
      {"mm of transposed",
       {{6, 4}, {5, 6}},
       [](const Inputs& x) { return at::mm(x[0].t(), x[1].t()); }},
      {"bmm", {{3, 4, 6}, {3, 6, 5}}, [](const Inputs& x) { return at::bmm(x[0], x[1]); }},
      {"matmul 3D", {{2, 4, 6}, {6, 5}}, [](const Inputs& x) { return at::matmul(x[0], x[1]); }},
      {"outer", {{4}, {5}}, [](const Inputs& x) { return x[0].unsqueeze(1) * x[1]; }},
  };
}

std::vector<Case> reduction_cases() {
  return {
      {"sum", {{4, 5}}, [](const Inputs& x) { return x[0].sum(); }},
      {"max", {{4, 6}}, [](const Inputs& x) { return x[0].max() + x[0].min(); }},
      {"amin", {{5, 6}}, [](const Inputs& x) { return x[0].amin(0, true); }},
      {"argmax",
       {{4, 6}},
       [](const Inputs& x) { return number(x[0].argmax(1) + x[0].argmin(1)); },
       false},
      {"prod", {{4, 6}}, [](const Inputs& x) { return x[0].prod(1); }, false},
      {"flip", {{4, 6}}, [](const Inputs& x) { return x[0].flip({1}); }},
      {"cumsum of one dim", {{7}}, [](const Inputs& x) { return x[0].cumsum(0); }},
      {"cumprod", {{4, 6}}, [](const Inputs& x) { return x[0].cumprod(0); }, false},
      {"stable sort",
       {{4, 6}},
       [](const Inputs& x) { return std::get<0>(at::sort(x[0], /*stable=*/true, 0, true)); }},
      {"layer_norm of one dim",
       {{6}, {6}, {6}},
       [](const Inputs& x) { return at::layer_norm(x[0], {6}, x[1], x[2], 1e-6); }},
      {"sum dim", {{4, 5, 3}}, [](const Inputs& x) { return x[0].sum(1); }},
      {"sum keepdim",
       {{4, 5, 3}},
       [](const Inputs& x) {
         return x[0].sum(at::IntArrayRef{0, 2}, true);
       }},
      {"mean", {{4, 6}}, [](const Inputs& x) { return x[0].mean(); }},
      {"mean uneven", {{5, 7}}, [](const Inputs& x) { return x[0].mean(0); }},
      {"amax", {{4, 6}}, [](const Inputs& x) { return x[0].amax(-1); }},
      {"logsumexp", {{4, 6}}, [](const Inputs& x) { return at::logsumexp(x[0], {1}); }},
      {"softmax", {{4, 6}}, [](const Inputs& x) { return at::softmax(x[0], -1); }},
      {"log_softmax", {{4, 3, 6}}, [](const Inputs& x) { return at::log_softmax(x[0], 1); }},
      {"cumsum", {{4, 6}}, [](const Inputs& x) { return x[0].cumsum(1); }},
      {"topk", {{4, 6}}, [](const Inputs& x) { return std::get<0>(x[0].topk(2, 1)); }},
      {"topk of rows", {{5, 3}}, [](const Inputs& x) { return std::get<0>(x[0].topk(2, 0)) * 3; }},
      {"max dim", {{4, 6}}, [](const Inputs& x) { return std::get<0>(x[0].max(1)); }},
      {"min keepdim", {{4, 6}}, [](const Inputs& x) { return std::get<0>(x[0].min(0, true)); }},
      {"sort", {{4, 6}, {4, 6}}, [](const Inputs& x) { return std::get<0>(x[0].sort(1)) * x[1]; }},
      {"layer_norm",
       {{2, 4, 6}, {6}, {6}},
       [](const Inputs& x) { return at::layer_norm(x[0], {6}, x[1], x[2], 1e-6); }},
      {"tril", {{3, 4, 4}}, [](const Inputs& x) { return x[0].tril(); }},
  };
}

// Parts that are all true or all false, and empty ones, among them.
std::vector<Case> truth_cases() {
  const auto few = [](const Tensor& x) { return x.gt(1.2); };
  const auto most = [](const Tensor& x) { return x.gt(-1.2); };
  return {
      {"any", {{2, 5}}, [=](const Inputs& x) { return number(few(x[0]).any()); }, false},
      {"all", {{2, 5}}, [=](const Inputs& x) { return number(most(x[0]).all()); }, false},
      {"any of a dim",
       {{4, 5}},
       [=](const Inputs& x) { return number(few(x[0]).any(1)) + number(few(x[0]).any()); },
       false},
      {"all of a dim",
       {{4, 5}},
       [=](const Inputs& x) { return number(most(x[0]).all(0, true)) + x[0]; },
       false},
      {"any of dims, then all",
       {{3, 4, 2}},
       [=](const Inputs& x) {
         const auto dims = std::vector<int64_t>{0, 2};
         return number(few(x[0]).any(dims)) + number(few(x[0]).any(dims).all());
       },
       false},
      {"any of numbers",
       {{4, 5}},
       [=](const Inputs& x) { return number(x[0].floor().any(1)); },
       false},
  };
}

std::vector<Case> factory_cases() {
  return {
      {"zeros_like", {{4, 5}}, [](const Inputs& x) { return at::zeros_like(x[0]) + x[0]; }},
      {"ones_like", {{4, 5}}, [](const Inputs& x) { return at::ones_like(x[0]) * x[0]; }},
      {"full_like", {{7}}, [](const Inputs& x) { return at::full_like(x[0], 2.5) * x[0]; }},
      {"empty_like", {{4, 5}}, [](const Inputs& x) { return at::empty_like(x[0]).copy_(x[0]); }},
      {"new_zeros",
       {{4, 5}},
       [](const Inputs& x) {
         return x[0].new_zeros({4, 5}) + x[0];
       }},
      {"new_full of other sizes",
       {{4, 5}},
       [](const Inputs& x) {
         return x[0].new_full({3, 2}, 2) * x[0].sum();
       }},
  };
}

TEST(Rules, Pointwise) { check_table(pointwise_cases()); }
TEST(Rules, Comparisons) { check_table(comparison_cases()); }
TEST(Rules, Views) { check_table(view_cases()); }
TEST(Rules, Products) { check_table(product_cases()); }
TEST(Rules, Reductions) { check_table(reduction_cases()); }
TEST(Rules, Truths) { check_table(truth_cases()); }
TEST(Rules, NewTensors) { check_table(factory_cases()); }

}  // namespace
}  // namespace longhaul::test
