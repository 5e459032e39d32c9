// The experts' products: rows and counts as tensors, and the overload `list` with the arguments of
// Ascend's torch_npu.npu_grouped_matmul. Of the forms in its API reference that has the one for all
// experts in one tensor: one x [M, K], one weight [E, K, N] and one result [M, N]; group_type 0
// (groups of rows), split_item 2 or 3 (one result), and as group_list a tensor of the rows up to
// the end of each group (group_list_type 0) or of the rows of each (1). Ascend leaves rows behind
// the last group as they are; here they are 0.
#include "longhaul/ops/grouped_matmul/grouped_matmul.h"

#include <ATen/core/grad_mode.h>

#include "longhaul/ops/library/operators.h"

namespace longhaul::ops::library {
namespace {

namespace cpu {

Tensor rows_of_groups(const Tensor& group_list) {
  check_dims(group_list, 1, "grouped_matmul: group_list");
  return to_int64(group_list, "grouped_matmul: group_list");
}

Tensor grouped_matmul(const Tensor& x, const Tensor& weight, const Tensor& group_list) {
  const at::NoGradGuard no_grad;
  return ops::grouped_matmul(x, weight, rows_of_groups(group_list), Kernel::kFused);
}

std::tuple<Tensor, Tensor> grouped_matmul_grad(const Tensor& grad, const Tensor& x,
                                               const Tensor& weight, const Tensor& group_list,
                                               Mask2 output_mask) {
  const auto d =
      ops::grouped_matmul_grad(grad.to(x.scalar_type()), x, weight, rows_of_groups(group_list),
                               {.d_x = output_mask[0], .d_weight = output_mask[1]});
  return {output_mask[0] ? d.d_x : no_result(x), output_mask[1] ? d.d_weight : no_result(weight)};
}

}  // namespace cpu

namespace meta {

Tensor grouped_matmul(const Tensor& x, const Tensor& weight, const Tensor& /*group_list*/) {
  return sized(x, {x.sym_size(0), weight.sym_size(1)}, x.scalar_type());
}

std::tuple<Tensor, Tensor> grouped_matmul_grad(const Tensor& /*grad*/, const Tensor& x,
                                               const Tensor& weight, const Tensor& /*group_list*/,
                                               Mask2 output_mask) {
  return {output_mask[0] ? sized_like(x) : no_result(x),
          output_mask[1] ? sized_like(weight) : no_result(weight)};
}

}  // namespace meta

namespace autograd {

struct GroupedMatmul : torch::autograd::Function<GroupedMatmul> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const Tensor& group_list) {
    static const auto op = find_operator<decltype(cpu::grouped_matmul)>("grouped_matmul");
    ctx->save_for_backward({x, weight, group_list});
    const at::AutoDispatchBelowADInplaceOrView guard;
    return op.call(x, weight, group_list);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static const auto op = find_operator<decltype(cpu::grouped_matmul_grad)>("grouped_matmul_grad");
    const auto saved = ctx->get_saved_variables();
    const Mask2 wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1)};
    const auto [d_x, d_weight] = op.call(grads[0], saved[0], saved[1], saved[2], wanted);
    return {wanted[0] ? d_x : Tensor(), wanted[1] ? d_weight : Tensor(), Tensor()};
  }
};

Tensor grouped_matmul(const Tensor& x, const Tensor& weight, const Tensor& group_list) {
  return GroupedMatmul::apply(x, weight, group_list);
}

}  // namespace autograd

namespace composite {

using MaybeTensors = std::optional<at::TensorList>;
using MaybeInt = std::optional<int64_t>;

constexpr const char* kOp = "grouped_matmul";
constexpr int64_t kRowsUpToEnd = 0, kRowsOfEach = 1;  // Ascend's group_list_type
constexpr int64_t kGroupsOfRows = 0;                  // Ascend's group_type

std::string text_of(const MaybeInt& value) { return value ? std::to_string(*value) : "None"; }

std::string sizes_of(at::TensorList list) {
  std::vector<std::string> sizes;
  for (const Tensor& x : list) sizes.push_back(fmt::format("[{}]", shape_text(x)));
  return fmt::format("{} ({})", list.size(), fmt::join(sizes, " and "));
}

// Callers of Ascend's give empty lists, too, for what is absent.
void check_none(std::initializer_list<std::pair<const char*, MaybeTensors>> lists) {
  for (const auto& [name, list] : lists) {
    LONGHAUL_CHECK(!list || list->empty(), "{}: {} is not supported: expected none, got {}", kOp,
                   name, list ? list->size() : 0);
  }
}
void check_none(std::initializer_list<std::pair<const char*, MaybeInt>> numbers) {
  for (const auto& [name, value] : numbers) {
    LONGHAUL_CHECK(!value, "{}: {} is not supported: expected None, got {}", kOp, name,
                   text_of(value));
  }
}

void check_form(at::TensorList x, at::TensorList weight, const MaybeTensor& group_list,
                const MaybeInt& split_item, const MaybeInt& group_type) {
  LONGHAUL_CHECK(x.size() == 1 && x[0].dim() == 2, "{}: x: expected 1 tensor [M, K], got {}", kOp,
                 sizes_of(x));
  LONGHAUL_CHECK(weight.size() == 1 && weight[0].dim() == 3,
                 "{}: weight: expected 1 tensor [E, K, N], got {}", kOp, sizes_of(weight));
  LONGHAUL_CHECK(split_item == 2 || split_item == 3,
                 "{}: split_item: expected 2 or 3 (one tensor as the result), got {}", kOp,
                 text_of(split_item));
  LONGHAUL_CHECK(group_type == kGroupsOfRows, "{}: group_type: expected 0 (groups of rows), got {}",
                 kOp, text_of(group_type));
  LONGHAUL_CHECK(group_list && group_list->dim() == 1,
                 "{}: group_list: expected a tensor of one dimension, got {}", kOp,
                 group_list ? fmt::format("[{}]", shape_text(*group_list)) : "None");
}

Tensor rows_of_each(const Tensor& group_list, const MaybeInt& type) {
  LONGHAUL_CHECK(type == kRowsUpToEnd || type == kRowsOfEach,
                 "{}: group_list_type: expected 0 (rows up to the end of each group) or 1 (rows of "
                 "each), got {}",
                 kOp, text_of(type));
  if (type == kRowsOfEach) return group_list;
  return at::diff(group_list, 1, 0, at::zeros({1}, group_list.options()));
}

// A weight that is a transposed view of [E, N, K] costs nothing, another one a copy.
std::vector<Tensor> grouped_matmul(
    at::TensorList x, at::TensorList weight, const MaybeTensors& bias, const MaybeTensors& scale,
    const MaybeTensors& offset, const MaybeTensors& antiquant_scale,
    const MaybeTensors& antiquant_offset, const MaybeTensors& per_token_scale,
    const MaybeTensor& group_list, const MaybeTensors& activation_input,
    const MaybeTensors& activation_quant_scale, const MaybeTensors& activation_quant_offset,
    MaybeInt split_item, MaybeInt group_type, MaybeInt group_list_type, MaybeInt act_type,
    at::OptionalIntArrayRef tuning_config, MaybeInt output_dtype, MaybeInt x_dtype,
    MaybeInt weight_dtype, MaybeInt scale_dtype, MaybeInt per_token_scale_dtype) {
  static const auto op = find_operator<decltype(autograd::grouped_matmul)>(kOp);
  check_none({{"bias", bias},
              {"scale", scale},
              {"offset", offset},
              {"antiquant_scale", antiquant_scale},
              {"antiquant_offset", antiquant_offset},
              {"per_token_scale", per_token_scale},
              {"activation_input", activation_input},
              {"activation_quant_scale", activation_quant_scale},
              {"activation_quant_offset", activation_quant_offset}});
  check_none({{"output_dtype", output_dtype},
              {"x_dtype", x_dtype},
              {"weight_dtype", weight_dtype},
              {"scale_dtype", scale_dtype},
              {"per_token_scale_dtype", per_token_scale_dtype}});
  LONGHAUL_CHECK(act_type == 0, "{}: act_type: expected 0 (no activation), got {}", kOp,
                 text_of(act_type));
  LONGHAUL_CHECK(!tuning_config, "{}: tuning_config is not supported: expected None, got [{}]", kOp,
                 fmt::join(*tuning_config, ", "));
  check_form(x, weight, group_list, split_item, group_type);
  return {op.call(x[0], weight[0].transpose(1, 2), rows_of_each(*group_list, group_list_type))};
}

}  // namespace composite
}  // namespace

TORCH_LIBRARY_FRAGMENT(longhaul, m) {
  m.def("grouped_matmul(Tensor x, Tensor weight, Tensor group_list) -> Tensor", kTags);
  m.def(
      "grouped_matmul_grad(Tensor grad, Tensor x, Tensor weight, Tensor group_list, "
      "bool[2] output_mask) -> (Tensor, Tensor)",
      kTags);
  m.def(
      "grouped_matmul.list(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, "
      "Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, "
      "Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, Tensor? group_list=None, "
      "Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
      "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, "
      "int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
      "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, "
      "int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]",
      kTags);
}

TORCH_LIBRARY_IMPL(longhaul, CompositeImplicitAutograd, m) {
  m.impl("grouped_matmul.list", composite::grouped_matmul);
}

TORCH_LIBRARY_IMPL(longhaul, CPU, m) {
  m.impl("grouped_matmul", cpu::grouped_matmul);
  m.impl("grouped_matmul_grad", cpu::grouped_matmul_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Meta, m) {
  m.impl("grouped_matmul", meta::grouped_matmul);
  m.impl("grouped_matmul_grad", meta::grouped_matmul_grad);
}

TORCH_LIBRARY_IMPL(longhaul, Autograd, m) {
  m.impl("grouped_matmul", autograd::grouped_matmul);
  m.impl("grouped_matmul_grad", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace longhaul::ops::library
