#include "longhaul/parallel/collectives.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "longhaul/base/error.h"
#include "longhaul/dtensor/dtensor.h"
#include "longhaul/ops/saved_results.h"

namespace longhaul::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Tensor of x's kind with `rows` rows.
Tensor empty_rows(const Tensor& x, int64_t rows) {
  auto sizes = x.sizes().vec();
  sizes[0] = rows;
  return at::empty(sizes, x.options().requires_grad(false));
}

// The group, kept for the backward pass.
struct Holder : torch::CustomClassHolder {
  explicit Holder(Group group) : group(std::move(group)) {}
  Group group;
};

void keep(AutogradContext* ctx, const Group& group) {
  ctx->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(group));
}

Group kept(AutogradContext* ctx) {
  return static_cast<const Holder&>(*ctx->saved_data["group"].toCapsule()).group;
}

struct AllGatherRows : torch::autograd::Function<AllGatherRows> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Group& group) {
    keep(ctx, group);
    return ops::saved_or_computed({.op = "all_gather"}, [&] {
      Tensor all = empty_rows(x, x.size(0) * group->size());
      group->all_gather(all, x.contiguous()).wait();
      return all;
    });
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Group group = kept(ctx);
    Tensor own = empty_rows(grads[0], grads[0].size(0) / group->size());
    group->reduce_scatter(own, grads[0].contiguous(), dtensor::Reduction::kSum).wait();
    return {own, Tensor()};
  }
};

// How many rows go to each rank and come from it.
struct Traffic {
  std::vector<int64_t> sent, received;
};

Tensor exchanged(const Tensor& x, const Traffic& rows, const Group& group) {
  Tensor arrived =
      empty_rows(x, std::accumulate(rows.received.begin(), rows.received.end(), int64_t{0}));
  group->all_to_all(arrived, x.contiguous(), rows.received, rows.sent).wait();
  return arrived;
}

struct AllToAllRows : torch::autograd::Function<AllToAllRows> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Traffic& rows,
                        const Group& group) {
    keep(ctx, group);
    ctx->saved_data["sent"] = rows.sent;
    ctx->saved_data["received"] = rows.received;
    return ops::saved_or_computed({.op = "all_to_all"}, [&] { return exchanged(x, rows, group); });
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Traffic back = {.sent = ctx->saved_data["received"].toIntVector(),
                          .received = ctx->saved_data["sent"].toIntVector()};
    return {exchanged(grads[0], back, kept(ctx)), Tensor(), Tensor()};
  }
};

struct PermuteRows : torch::autograd::Function<PermuteRows> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& order,
                        const Tensor& inverse) {
    ctx->save_for_backward({inverse});
    return x.index_select(0, order);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return {grads[0].index_select(0, ctx->get_saved_variables()[0]), Tensor(), Tensor()};
  }
};

}  // namespace

Tensor all_gather_rows(const Tensor& x, const Group& group) {
  return AllGatherRows::apply(x, group);
}

Tensor all_to_all_rows(const Tensor& x, const std::vector<int64_t>& input_rows,
                       const std::vector<int64_t>& output_rows, const Group& group) {
  return AllToAllRows::apply(x, Traffic{input_rows, output_rows}, group);
}

Tensor permute_rows(const Tensor& x, const Tensor& order, const Tensor& inverse) {
  return PermuteRows::apply(x, order, inverse);
}

Tensor own_term(const Tensor& x, const std::string& what) {
  if (!dtensor::is_dtensor(x)) return x.detach();
  const auto& [mesh, placements] = dtensor::spec_of(x);
  bool counts = true;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    const auto& placement = placements[axis];
    LONGHAUL_CHECK(!placement.is_partial() || placement.is_partial(dtensor::Reduction::kSum),
                   "{} is {} on axis {}, whose ranks have no terms of a sum then; redistribute it "
                   "to Replicate",
                   what, placement.text(), mesh->axis(static_cast<int>(axis)).axis());
    const bool first = mesh->axis(static_cast<int>(axis)).rank() == 0;
    counts = counts && (first || !placement.is_replicate());
  }
  const Tensor local = dtensor::local_of(x);
  return counts ? local : at::zeros_like(local);
}

Tensor sum_over(const Tensor& x, const Group& group) {
  Tensor sum = x.detach().clone(at::MemoryFormat::Contiguous);
  group->all_reduce(sum, dtensor::Reduction::kSum).wait();
  return sum;
}

}  // namespace longhaul::parallel
