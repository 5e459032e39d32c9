// The layers that models are made of. Parameters are kept in the dtype of training (fp32 as a
// rule); a layer computes in the dtype of its input and casts its parameters to it on the way, so
// that gradients arrive in the parameters' dtype.
#pragma once

#include "longhaul/nn/module.h"
#include "longhaul/ops/rms_norm/rms_norm.h"

namespace longhaul::nn {

// The spec of parameters that are used as they are kept (NamedParameter::exact).
TensorSpec exact(TensorSpec spec);

// y = x W^T; weight [out, in], no bias.
class Linear : public Module {
 public:
  Linear(int64_t in_features, int64_t out_features, const TensorSpec& spec);
  Tensor forward(const Tensor& x) const;

  Tensor weight;
};

// Rows of a table: ids [...] int64 to [..., D] in `compute_dtype`.
class Embedding : public Module {
 public:
  Embedding(int64_t vocab_size, int64_t dim, const TensorSpec& spec);
  Tensor forward(const Tensor& ids, at::ScalarType compute_dtype) const;

  Tensor weight;
};

// See ops/rms_norm.
class RMSNorm : public Module {
 public:
  RMSNorm(int64_t dim, double eps, const TensorSpec& spec);
  Tensor forward(const Tensor& x) const;
  // Of x + residual, which is returned beside it.
  ops::NormedSum forward_add(const Tensor& x, const Tensor& residual) const;

  Tensor weight;

 private:
  double eps_;
  ops::Kernel kernel_ = ops::Kernel::kReference;
};

// (x - mean) / sqrt(var + eps) * weight + bias over the last dim, in fp32 (fp64 for fp64), result
// in the dtype of x.
class LayerNorm : public Module {
 public:
  LayerNorm(int64_t dim, double eps, const TensorSpec& spec);
  Tensor forward(const Tensor& x) const;

  Tensor weight, bias;

 private:
  double eps_;
};

}  // namespace longhaul::nn
