// at::Tensor to and from safetensors bytes, and functions for a file that fits into memory.
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

// A new CPU tensor of this dtype and shape.
at::Tensor empty_tensor(const safetensors::TensorInfo& info);

// The bytes of a contiguous CPU tensor.
std::span<std::byte> bytes_of(const at::Tensor& tensor);

// A new CPU tensor with rows first .. first + count - 1 (dim 0) of a tensor in a file; nothing else
// is read. Error if it has not so many.
at::Tensor read_rows(const safetensors::Reader& file, const safetensors::TensorInfo& info,
                     int64_t first, int64_t count);

// A new CPU tensor with all of it.
at::Tensor read_tensor(const safetensors::Reader& file, const safetensors::TensorInfo& info);

// Writes all tensors to one file, replacing it atomically.
void save_safetensors(const fs::path& path, const TensorMap& tensors,
                      const safetensors::Metadata& metadata = {});

TensorMap load_safetensors(const fs::path& path);

}  // namespace longhaul::checkpoint
