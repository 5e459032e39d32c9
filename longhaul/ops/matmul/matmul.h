// Matrix products with gradients. fp32 products on a CPU with AVX-512 go through oneDNN's exact
// fp32 kernels, which are about twice as fast as MKL on AMD and give the same bits on 1 and 2
// threads; large ones on Intel, and every other case, are ATen's (MKL: bits depend on the number of
// threads). Both dtypes must be equal; the result has the same dtype. Used by nn::Linear and by the
// reference operators.
//   linear: dX = dY W,  dW = dY^T X.      bmm: dA = dC B^T,  dB = A^T dC.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace longhaul::ops {

using at::Tensor;

// Whose kernels take fp32 products on this CPU, and if not oneDNN's, why. For the start-up table.
std::string fp32_product_kernels();

// x [..., K] times weight [N, K] transposed: [..., N].
Tensor linear(const Tensor& x, const Tensor& weight_NK);

// x [B, S, H, I] times weight [H, I, O] head by head: [B, S, H, O].
Tensor linear_by_head(const Tensor& x_BSHI, const Tensor& weight_HIO);

// [B, M, K] times [B, K, N]: [B, M, N]. Operands may be transposed views.
Tensor bmm(const Tensor& a_BMK, const Tensor& b_BKN);

// out = a b + beta out without autograd, for 2-D or batched 3-D operands; beta is 0 or 1.
// `out` must be contiguous in its last dimension. The building block of the above.
void product_out(const Tensor& a, const Tensor& b, Tensor& out, float beta = 0.0F);

// a b as a new tensor, without autograd.
Tensor product(const Tensor& a, const Tensor& b);

}  // namespace longhaul::ops
