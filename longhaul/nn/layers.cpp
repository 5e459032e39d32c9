#include "longhaul/nn/layers.h"

#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/distributed.h"
#include "longhaul/ops/matmul/matmul.h"

namespace longhaul::nn {

TensorSpec exact(TensorSpec spec) {
  spec.exact = true;
  return spec;
}

Linear::Linear(int64_t in_features, int64_t out_features, const TensorSpec& spec) {
  add_parameter("weight", weight, {out_features, in_features}, Init::kNormal, spec);
}

Tensor Linear::forward(const Tensor& x) const {
  return hooked({x}, [this](const std::vector<Tensor>& in) {
    return ops::linear(in[0], weight.to(in[0].scalar_type()));
  });
}

namespace {

Tensor rows_of(const Tensor& weight, const Tensor& ids) {
  if (!ops::is_distributed_tensor(weight)) return at::embedding(weight, ids);
  return ops::distributed<Tensor(const Tensor&, const Tensor&)>("embedding").call(weight, ids);
}

}  // namespace

Embedding::Embedding(int64_t vocab_size, int64_t dim, const TensorSpec& spec) {
  add_parameter("weight", weight, {vocab_size, dim}, Init::kNormal, exact(spec));
}

Tensor Embedding::forward(const Tensor& ids, at::ScalarType compute_dtype) const {
  // Looked up before the cast: the gradient is then summed in the table's dtype.
  return rows_of(weight, ids).to(compute_dtype);
}

RMSNorm::RMSNorm(int64_t dim, double eps, const TensorSpec& spec) : eps_(eps) {
  add_parameter("weight", weight, {dim}, Init::kOnes, spec);
  add_kernel("rms_norm", kernel_);
}

Tensor RMSNorm::forward(const Tensor& x) const { return ops::rms_norm(x, weight, eps_, kernel_); }

ops::NormedSum RMSNorm::forward_add(const Tensor& x, const Tensor& residual) const {
  return ops::rms_norm_add(x, residual, weight, eps_, kernel_);
}

LayerNorm::LayerNorm(int64_t dim, double eps, const TensorSpec& spec) : eps_(eps) {
  add_parameter("weight", weight, {dim}, Init::kOnes, exact(spec));
  add_parameter("bias", bias, {dim}, Init::kZeros, exact(spec));
}

Tensor LayerNorm::forward(const Tensor& x) const {
  const auto wide = ops::wide_type(x);
  const Tensor y =
      at::layer_norm(x.to(wide), {weight.size(0)}, weight.to(wide), bias.to(wide), eps_);
  return y.to(x.scalar_type());
}

}  // namespace longhaul::nn
