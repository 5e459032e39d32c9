// Shapes on the Meta device for the ATen operators that we use and that libtorch registers there
// only from Python. Without them a model could not be planned without memory.
#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/library.h>

namespace longhaul::ops {
namespace {

using at::Tensor;

Tensor index_select(const Tensor& x, int64_t dim, const Tensor& index) {
  auto sizes = x.sizes().vec();
  sizes[at::maybe_wrap_dim(dim, x.dim())] = index.numel();
  return at::empty(sizes, x.options());
}

Tensor embedding_dense_backward(const Tensor& dy, const Tensor& /*ids*/, int64_t rows,
                                int64_t /*padding_idx*/, bool /*scale_by_frequency*/) {
  return at::empty({rows, dy.size(-1)}, dy.options());
}

// The sizes of x with 1 in the normalised dims at the end: those of mean and rstd.
std::vector<int64_t> statistics_sizes(const Tensor& x, size_t normalized_dims) {
  auto sizes = x.sizes().vec();
  std::fill(sizes.end() - static_cast<int64_t>(normalized_dims), sizes.end(), 1);
  return sizes;
}

std::tuple<Tensor, Tensor, Tensor> native_layer_norm(const Tensor& x, at::IntArrayRef shape,
                                                     const std::optional<Tensor>& /*weight*/,
                                                     const std::optional<Tensor>& /*bias*/,
                                                     double /*eps*/) {
  const auto sizes = statistics_sizes(x, shape.size());
  return {at::empty(x.sizes(), x.options()), at::empty(sizes, x.options()),
          at::empty(sizes, x.options())};
}

std::tuple<Tensor, Tensor, Tensor> native_layer_norm_backward(
    const Tensor& dy, const Tensor& /*x*/, at::IntArrayRef shape, const Tensor& /*mean*/,
    const Tensor& /*rstd*/, const std::optional<Tensor>& /*weight*/,
    const std::optional<Tensor>& /*bias*/, std::array<bool, 3> wanted) {
  const auto make = [&](bool one, at::IntArrayRef sizes) {
    return one ? at::empty(sizes, dy.options()) : Tensor();
  };
  return {make(wanted[0], dy.sizes()), make(wanted[1], shape), make(wanted[2], shape)};
}

// The functional forms make an empty result and call these; in-place forms pass the operand itself.
Tensor& binary_out(const Tensor& a, const Tensor& b, Tensor& out) {
  const auto sizes = at::infer_size(a.sizes(), b.sizes());
  if (out.sizes() != at::IntArrayRef(sizes)) out.resize_(sizes);
  return out;
}

Tensor& unary_out(const Tensor& x, Tensor& out) {
  if (out.sizes() != x.sizes()) out.resize_(x.sizes());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("index_select", TORCH_FN(index_select));
  m.impl("embedding_dense_backward", TORCH_FN(embedding_dense_backward));
  m.impl("logical_and.out", TORCH_FN(binary_out));
  m.impl("logical_or.out", TORCH_FN(binary_out));
  m.impl("logical_not.out", TORCH_FN(unary_out));
  m.impl("abs.out", TORCH_FN(unary_out));
  m.impl("native_layer_norm", TORCH_FN(native_layer_norm));
  m.impl("native_layer_norm_backward", TORCH_FN(native_layer_norm_backward));
}

}  // namespace longhaul::ops

// Named on the linker's command line (CMakeLists.txt), so that this file is linked although nothing
// calls it.
extern "C" void longhaul_ops_meta_kernels() {}
