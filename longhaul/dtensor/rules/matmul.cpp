// Matrix products. A product may be computed on slices of its rows, on slices of its columns, or on
// slices of what is summed over, which leaves terms. Nothing is cut that comes whole: a replicated
// input times a replicated weight stays replicated.
#include "longhaul/dtensor/rules/rules.h"

namespace longhaul::dtensor {
namespace {

constexpr const char* kFile = "longhaul/dtensor/rules/matmul.cpp";

Placement whole() { return Placement::replicate(); }
Placement term() { return Placement::partial(); }
Placement cut(int64_t dim) { return Placement::shard(dim); }

// [M, K] times [K, N], behind `batch` dims that both have.
std::vector<Strategy> product(int64_t batch) {
  std::vector<Strategy> strategies = {{{whole(), whole()}, {whole()}}};
  for (int64_t dim = 0; dim < batch; ++dim) {
    strategies.push_back({{cut(dim), cut(dim)}, {cut(dim)}});
  }
  strategies.push_back({{cut(batch), whole()}, {cut(batch)}});
  strategies.push_back({{whole(), cut(batch + 1)}, {cut(batch + 1)}});
  strategies.push_back({{cut(batch + 1), cut(batch)}, {term()}});
  strategies.push_back({{term(), whole()}, {term()}});
  strategies.push_back({{whole(), term()}, {term()}});
  return strategies;
}

std::vector<Strategy> mm(const OpCall& /*call*/, int64_t /*ranks*/) { return product(0); }
std::vector<Strategy> bmm(const OpCall& /*call*/, int64_t /*ranks*/) { return product(1); }

// x [..., K] times weight [N, K] transposed.
std::vector<Strategy> linear(const OpCall& call, int64_t /*ranks*/) {
  const int64_t last = call.input(0).dim() - 1;
  std::vector<Strategy> strategies = {{{whole(), whole()}, {whole()}}};
  for (int64_t dim = 0; dim < last; ++dim) {
    strategies.push_back({{cut(dim), whole()}, {cut(dim)}});
  }
  strategies.push_back({{whole(), cut(0)}, {cut(last)}});
  strategies.push_back({{cut(last), cut(1)}, {term()}});
  strategies.push_back({{term(), whole()}, {term()}});
  return strategies;
}

// dX = dY W and dW = dY^T X are two products that share dY: each way of one that leaves W where it
// is, together with the way of the other whose dW lies as W does.
//   inputs dY, X, W; results dX, dW.
std::vector<Strategy> linear_grad(const OpCall& call, int64_t /*ranks*/) {
  const int64_t last = call.input(0).dim() - 1;
  std::vector<Strategy> strategies = {{{whole(), whole(), whole()}, {whole(), whole()}}};
  for (int64_t dim = 0; dim < last; ++dim) {
    strategies.push_back({{cut(dim), cut(dim), whole()}, {cut(dim), term()}});
  }
  strategies.push_back({{cut(last), whole(), cut(0)}, {term(), cut(0)}});
  strategies.push_back({{whole(), cut(last), cut(1)}, {cut(last), cut(1)}});
  strategies.push_back({{term(), whole(), whole()}, {term(), term()}});
  return strategies;
}

}  // namespace

void add_matmul_rules(RuleTable& table) {
  table["aten::mm"] = {.rule = mm, .file = kFile};
  table["aten::bmm"] = {.rule = bmm, .file = kFile};
  table["longhaul_model::linear"] = {.rule = linear, .file = kFile};
  table["longhaul_model::linear_grad"] = {.rule = linear_grad, .file = kFile};
}

}  // namespace longhaul::dtensor
