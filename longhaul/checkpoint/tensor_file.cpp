#include "longhaul/checkpoint/tensor_file.h"

#include <fmt/ranges.h>

#include <array>
#include <utility>

namespace longhaul::checkpoint {
namespace {

using safetensors::DType;

constexpr std::array<std::pair<DType, at::ScalarType>, 11> kTypes = {
    {{DType::kF64, at::kDouble},
     {DType::kF32, at::kFloat},
     {DType::kF16, at::kHalf},
     {DType::kBF16, at::kBFloat16},
     {DType::kI64, at::kLong},
     {DType::kI32, at::kInt},
     {DType::kI16, at::kShort},
     {DType::kI8, at::kChar},
     {DType::kU8, at::kByte},
     {DType::kBool, at::kBool},
     {DType::kF8E4M3, at::kFloat8_e4m3fn}}};

void write_tensors(safetensors::Writer& writer, const TensorMap& tensors) {
  for (const auto& info : writer.tensors()) {
    const at::Tensor host = on_host(tensors.at(info.name));
    writer.write(info.name, host.const_data_ptr(), static_cast<size_t>(info.bytes()));
  }
  writer.finish();
}

}  // namespace

at::ScalarType to_scalar_type(DType dtype) {
  for (const auto& [ours, theirs] : kTypes) {
    if (ours == dtype) return theirs;
  }
  LONGHAUL_CHECK(false, "dtype {} has no tensor type", safetensors::dtype_name(dtype));
}

safetensors::TensorInfo describe(const std::string& name, const at::Tensor& tensor) {
  LONGHAUL_CHECK(tensor.defined(), "tensor '{}' is undefined and cannot be saved", name);
  LONGHAUL_CHECK(tensor.layout() == at::kStrided && !tensor.is_meta() && !tensor.is_quantized(),
                 "tensor '{}' on {} has no plain contents and cannot be saved", name,
                 tensor.device().str());
  return describe_shape(name, tensor);
}

safetensors::TensorInfo describe_shape(const std::string& name, const at::Tensor& tensor) {
  safetensors::TensorInfo info;
  info.name = name;
  info.shape = tensor.sizes().vec();
  for (const auto& [ours, theirs] : kTypes) {
    if (theirs == tensor.scalar_type()) {
      info.dtype = ours;
      return info;
    }
  }
  LONGHAUL_CHECK(false, "tensor '{}' has dtype {}, which cannot be saved", name,
                 at::toString(tensor.scalar_type()));
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU).resolve_neg().contiguous();
}

at::Tensor on_host(const at::Tensor& tensor, const safetensors::TensorInfo& planned) {
  at::Tensor host = on_host(tensor);
  LONGHAUL_CHECK(host.sizes() == at::IntArrayRef(planned.shape) &&
                     host.scalar_type() == to_scalar_type(planned.dtype),
                 "'{}' is {} [{}], planned was {} [{}]", planned.name,
                 c10::toString(host.scalar_type()), fmt::join(host.sizes(), ", "),
                 safetensors::dtype_name(planned.dtype), fmt::join(planned.shape, ", "));
  return host;
}

at::Tensor empty_tensor(const safetensors::TensorInfo& info) {
  return at::empty(info.shape, at::TensorOptions(to_scalar_type(info.dtype)));
}

std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

at::Tensor read_rows(const safetensors::Reader& file, const safetensors::TensorInfo& info,
                     int64_t first, int64_t count) {
  LONGHAUL_CHECK(!info.shape.empty() && first >= 0 && count >= 0 && first + count <= info.shape[0],
                 "rows {} to {} of '{}' {}", first, first + count, info.name,
                 safetensors::shape_text(info.shape));
  safetensors::TensorInfo rows = info;
  rows.shape[0] = count;
  const at::Tensor tensor = empty_tensor(rows);
  const int64_t row_bytes = info.shape[0] == 0 ? 0 : info.bytes() / info.shape[0];
  FileReader(file.path())
      .read(file.header().data_start + info.begin + first * row_bytes, bytes_of(tensor));
  return tensor;
}

at::Tensor read_tensor(const safetensors::Reader& file, const safetensors::TensorInfo& info) {
  const at::Tensor tensor = empty_tensor(info);
  FileReader(file.path()).read(file.header().data_start + info.begin, bytes_of(tensor));
  return tensor;
}

void save_safetensors(const fs::path& path, const TensorMap& tensors,
                      const safetensors::Metadata& metadata) {
  std::vector<safetensors::TensorInfo> infos;
  for (const auto& [name, tensor] : tensors) infos.push_back(describe(name, tensor));
  const fs::path temporary = temporary_name(path);
  safetensors::Writer writer(temporary, std::move(infos), metadata);
  write_tensors(writer, tensors);
  try {
    rename_durably(temporary, path);
  } catch (...) {
    std::error_code ignored;
    fs::remove(temporary, ignored);
    throw;
  }
}

TensorMap load_safetensors(const fs::path& path) {
  const safetensors::Reader reader(path);
  TensorMap tensors;
  for (const auto& [name, info] : reader.header().tensors) {
    tensors.emplace(name, read_tensor(reader, info));
  }
  return tensors;
}

}  // namespace longhaul::checkpoint
