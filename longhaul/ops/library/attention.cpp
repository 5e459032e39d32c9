#include "longhaul/ops/library/attention.h"

namespace longhaul::ops::library {
namespace {

Tensor with_rope(const char* op, const char* name, const Tensor& x, const MaybeTensor& rope) {
  if (!rope) return x;
  const std::string what = fmt::format("{}: {}_rope", op, name);
  auto sizes = x.sizes().vec();
  if (!sizes.empty()) sizes.back() = kAnySize;
  check_shape(*rope, sizes, what.c_str());
  check_same_dtype(*rope, x, what.c_str(), name);
  return at::cat({x, *rope}, -1);
}

}  // namespace

AttentionOperands attention_operands(const Layout& layout, const AttentionArguments& a) {
  LONGHAUL_CHECK(a.query_rope.has_value() == a.key_rope.has_value(),
                 "{}: query_rope and key_rope: expected both or neither, got {} alone", a.op,
                 a.query_rope ? "query_rope" : "key_rope");
  return {layout.in(with_rope(a.op, "query", a.query, a.query_rope)),
          layout.in(with_rope(a.op, "key", a.key, a.key_rope)),
          a.value ? layout.in(*a.value) : Tensor()};
}

AttentionOperands dense_attention_operands(const Layout& layout, const AttentionArguments& a) {
  auto [query, key, value] = attention_operands(layout, a);
  const bool is_shared = key.dim() == 4 && key.size(2) == 1;
  if (!is_shared) return {query, key, value};
  return {query, key.squeeze(2), a.value ? layout.shared_head(*a.value, "value") : value};
}

AttentionState attention_state(const Layout& layout, const AttentionOperands& operands,
                               const Tensor& softmax_max, const Tensor& softmax_sum,
                               double scale_value) {
  return {.query_BSHD = operands.query_BSHD,
          .key = operands.key,
          .value = operands.value,
          .softmax_max = layout.from_statistics(softmax_max, "softmax_max"),
          .softmax_sum = layout.from_statistics(softmax_sum, "softmax_sum"),
          .scale = scale_value};
}

AttentionGradients reference_attention_gradients(
    const AttentionState& attention, const Tensor& d_out,
    const std::function<Tensor(const Tensor&, const Tensor&, const Tensor&)>& attend) {
  const bool has_value = attention.value.defined();
  std::vector<Tensor> inputs = {attention.query_BSHD, attention.key};
  if (has_value) inputs.push_back(attention.value);
  const auto found = reference_gradients(
      [&](const std::vector<Tensor>& x) { return attend(x[0], x[1], has_value ? x[2] : Tensor()); },
      inputs, d_out.to(attention.query_BSHD.scalar_type()));
  return {found[0], found[1], has_value ? found[2] : Tensor()};
}

AttentionResults attention_results(const Layout& layout, const AttentionArguments& a,
                                   const AttentionGradients& gradients) {
  const auto in_layout = [&](const Tensor& rows) {
    return rows.dim() == 3 ? layout.with_head(rows) : layout.out(rows);
  };
  const auto parts = [&](const Tensor& gradient, const Tensor& x, const MaybeTensor& rope) {
    const int64_t width = x.size(-1);
    return std::pair(gradient.narrow(-1, 0, width).contiguous(),
                     rope ? gradient.narrow(-1, width, rope->size(-1)).contiguous() : no_result(x));
  };
  const auto [d_query, d_query_rope] = parts(in_layout(gradients.d_query), a.query, a.query_rope);
  const auto [d_key, d_key_rope] = parts(in_layout(gradients.d_key), a.key, a.key_rope);
  const Tensor d_value =
      gradients.d_value.defined() ? in_layout(gradients.d_value) : no_result(a.key);
  return {d_query, d_key, d_value, d_query_rope, d_key_rope};
}

AttentionResults sized_like_attention(const AttentionArguments& a) {
  const auto like = [](const MaybeTensor& x, const Tensor& absent) {
    return x ? sized_like(*x) : no_result(absent);
  };
  return {sized_like(a.query), sized_like(a.key), like(a.value, a.key), like(a.query_rope, a.query),
          like(a.key_rope, a.key)};
}

ThreeTensors sized_attention(const AttentionArguments& a, bool return_softmax_lse) {
  SymSizes out = a.query.sym_sizes().vec();
  out.back() = (a.value ? *a.value : a.key).sym_size(-1);
  SymSizes statistics = {0};
  if (return_softmax_lse) {  // [B, N, S, G], or [N, T, G]
    const auto heads = a.key.sym_size(-2);
    statistics = out;
    statistics.back() = statistics[statistics.size() - 2] / heads;
    statistics.erase(statistics.end() - 2);
    statistics.insert(statistics.end() - 2, heads);
  }
  const auto wide = wide_type(a.query);
  return {sized(a.query, out, a.query.scalar_type()), sized(a.query, statistics, wide),
          sized(a.query, statistics, wide)};
}

}  // namespace longhaul::ops::library
