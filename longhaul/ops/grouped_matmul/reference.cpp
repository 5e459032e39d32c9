#include <torch/csrc/autograd/custom_function.h>

#include "longhaul/base/error.h"
#include "longhaul/ops/common.h"
#include "longhaul/ops/grouped_matmul/grouped_matmul.h"
#include "longhaul/ops/matmul/matmul.h"
#include "longhaul/ops/saved_results.h"

namespace longhaul::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// oneDNN makes a new primitive for each new shape, which takes longer than the product of a small
// group. So products are asked for in multiples of this many rows: few shapes, each made once.
constexpr int64_t kRowStep = 16;

struct Group {
  int64_t expert, begin, rows;
};

// The groups that have rows. Reads the counts on the host; on the Meta device there are none.
std::vector<Group> groups_of(const Tensor& counts_E, int64_t total_rows) {
  std::vector<Group> groups;
  if (counts_E.is_meta()) return groups;
  const Tensor counts = counts_E.cpu();
  const auto* count = counts.const_data_ptr<int64_t>();
  int64_t begin = 0;
  for (int64_t e = 0; e < counts.numel(); ++e) {
    LONGHAUL_CHECK(count[e] >= 0, "grouped_matmul: counts[{}]: expected at least 0, got {}", e,
                   count[e]);
    if (count[e] > 0) groups.push_back({e, begin, count[e]});
    begin += count[e];
  }
  LONGHAUL_CHECK(begin <= total_rows,
                 "grouped_matmul: counts: expected together at most the {} rows of x, got {}",
                 total_rows, begin);
  return groups;
}

// out[group rows] = in[group rows] times op(weight[e]); rows behind the last group are 0. A product
// may run on into the rows of the next group, which writes them anew.
Tensor by_group(const Tensor& in, const Tensor& weight, const std::vector<Group>& groups) {
  Tensor out = at::empty({in.size(0), weight.size(2)}, in.options());
  int64_t end = 0;
  for (const auto& group : groups) {
    const int64_t rows =
        std::min(ceil_div(group.rows, kRowStep) * kRowStep, in.size(0) - group.begin);
    Tensor slice = out.narrow(0, group.begin, rows);
    product_out(in.narrow(0, group.begin, rows), weight[group.expert], slice);
    end = group.begin + group.rows;
  }
  out.narrow(0, end, out.size(0) - end).zero_();
  return out;
}

Tensor weight_gradient(const Tensor& x, const Tensor& dy, const Tensor& weight,
                       const std::vector<Group>& groups) {
  Tensor dw = at::empty_like(weight, at::MemoryFormat::Contiguous);
  std::vector<bool> written(weight.size(0), false);
  for (const auto& group : groups) {
    Tensor slice = dw[group.expert];
    const int64_t even = group.rows / kRowStep * kRowStep;
    const auto add = [&](int64_t begin, int64_t rows, float beta) {
      if (rows == 0) return;
      product_out(dy.narrow(0, begin, rows).t(), x.narrow(0, begin, rows), slice, beta);
    };
    add(group.begin, even, 0.0F);
    add(group.begin + even, group.rows - even, even == 0 ? 0.0F : 1.0F);
    written[group.expert] = true;
  }
  for (int64_t e = 0; e < weight.size(0); ++e) {
    if (!written[e]) dw[e].zero_();
  }
  return dw;
}

struct GroupedMatmul : torch::autograd::Function<GroupedMatmul> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const Tensor& counts) {
    ctx->save_for_backward({x, weight, counts});
    return saved_or_computed({.op = "grouped_matmul"}, [&] {
      return by_group(x, weight.transpose(1, 2), groups_of(counts, x.size(0)));
    });
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto [d_x, d_weight] = grouped_matmul_grad_reference(
        grads[0], saved[0], saved[1], saved[2],
        {.d_x = ctx->needs_input_grad(0), .d_weight = ctx->needs_input_grad(1)});
    return {d_x, d_weight, Tensor()};
  }
};

}  // namespace

GroupedMatmulGradients grouped_matmul_grad_reference(const Tensor& dy_MN, const Tensor& x_MK,
                                                     const Tensor& weight_ENK,
                                                     const Tensor& counts_E,
                                                     WantedGradients wanted) {
  const auto groups = groups_of(counts_E, x_MK.size(0));
  const Tensor dy = dy_MN.contiguous();
  GroupedMatmulGradients result;
  if (wanted.d_x) result.d_x = by_group(dy, weight_ENK, groups);
  if (wanted.d_weight) {
    result.d_weight = weight_gradient(x_MK.contiguous(), dy, weight_ENK, groups);
  }
  return result;
}

Tensor grouped_matmul_reference(const Tensor& x_MK, const Tensor& weight_ENK,
                                const Tensor& counts_E) {
  return GroupedMatmul::apply(x_MK.contiguous(), weight_ENK, counts_E);
}

}  // namespace longhaul::ops
