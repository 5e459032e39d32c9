// at::Tensor to and from safetensors bytes, and the two helpers for a file that fits into memory.
// Knows nothing of steps, manifests or Hugging Face folders. Called by the rest of checkpoint/, by
// debug dumps and by tests that read reference vectors.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <span>
#include <string>

#include "longhaul/base/safetensors.h"

namespace longhaul::checkpoint {

using TensorMap = std::map<std::string, at::Tensor>;

at::ScalarType to_scalar_type(safetensors::DType dtype);

// Dtype and shape under `name`. Error, naming the tensor, if safetensors has no such dtype or the
// tensor has no contents (undefined, meta, sparse, quantized).
safetensors::TensorInfo describe(const std::string& name, const at::Tensor& tensor);

// The same of a tensor that may have no contents.
safetensors::TensorInfo describe_shape(const std::string& name, const at::Tensor& tensor);

// The values as a contiguous CPU tensor without autograd; shares storage if it already is one.
at::Tensor on_host(const at::Tensor& tensor);

// The same. Error, naming the tensor, if it has not the dtype and shape that were planned.
at::Tensor on_host(const at::Tensor& tensor, const safetensors::TensorInfo& planned);

// A new CPU tensor with these contents.
at::Tensor to_tensor(const safetensors::TensorInfo& info, std::span<const std::byte> bytes);

// Writes all tensors to one file, replacing it atomically.
void save_safetensors(const fs::path& path, const TensorMap& tensors,
                      const safetensors::Metadata& metadata = {});

TensorMap load_safetensors(const fs::path& path);

}  // namespace longhaul::checkpoint
