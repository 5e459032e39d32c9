#include "longhaul/checkpoint/hf_weights.h"

#include "longhaul/base/json.h"
#include "longhaul/checkpoint/fp8_blocks.h"
#include "longhaul/checkpoint/tensor_file.h"

namespace longhaul::checkpoint {
namespace {

using safetensors::DType;
using safetensors::shape_text;

bool is_floating(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kBF16 ||
         dtype == DType::kF16;
}

// A key that is not there says nothing against the form that is supported.
void check_value(const nlohmann::json& config, const char* key, const nlohmann::json& expected,
                 const std::string& origin) {
  const auto found = config.find(key);
  if (found == config.end() || *found == expected) return;
  fail_user(
      "{}: quantization_config: {} is {}, only {} can be read; convert the weights to bfloat16",
      origin, key, found->dump(), expected.dump());
}

void check_quantization_config(const fs::path& folder) {
  const fs::path path = folder / "config.json";
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored) || !fs::exists(path, ignored)) return;
  const auto config = parse_json(read_file(path), path.string());
  const auto found = config.find("quantization_config");
  if (!config.is_object() || found == config.end() || found->is_null()) return;
  if (!found->is_object()) {
    fail_user("{}: quantization_config is {}, no object", path.string(), found->dump());
  }
  // How activations were scaled says nothing of the weights.
  const auto supported = quantization_config();
  for (const char* key : {"quant_method", "fmt", "weight_block_size"}) {
    check_value(*found, key, supported.at(key), path.string());
  }
}

}  // namespace

HfWeights::HfWeights(const fs::path& path) : reader_(path) {
  std::string other;
  for (const auto& name : reader_.names()) {
    const DType dtype = reader_.info(name).dtype;
    if (dtype == DType::kF8E4M3) {
      quantized_.insert(name);
    } else if (!is_floating(dtype) && other.empty()) {
      other = name;
    }
  }
  if (!quantized_.empty() || !other.empty()) check_quantization_config(path);
  if (!other.empty()) {
    fail_user(
        "{}: {} is {}: of quantized weights only F8_E4M3 with scales of blocks can be read; "
        "convert them to bfloat16",
        path.string(), other, safetensors::dtype_name(reader_.info(other).dtype));
  }
}

std::vector<std::string> HfWeights::names() const {
  auto names = reader_.names();
  std::erase_if(names, [this](const std::string& name) {
    return name.ends_with(kScaleSuffix) &&
           quantized_.contains(name.substr(0, name.rfind(kScaleSuffix)));
  });
  return names;
}

const std::vector<int64_t>& HfWeights::shape(const std::string& name) const {
  return reader_.info(name).shape;
}

at::ScalarType HfWeights::dtype(const std::string& name) const {
  return quantized_.contains(name) ? at::kFloat : to_scalar_type(reader_.info(name).dtype);
}

std::string HfWeights::problem(const std::string& name) const {
  if (!quantized_.contains(name)) return "";
  const auto& sizes = shape(name);
  if (sizes.size() != 2) return fmt::format("{} is F8_E4M3 but no matrix", name);
  const std::string scale = name + kScaleSuffix;
  if (!reader_.contains(scale)) return fmt::format("{} is missing", scale);
  const auto& info = reader_.info(scale);
  if (info.dtype != DType::kF32) {
    return fmt::format("{} is {}, expected F32", scale, safetensors::dtype_name(info.dtype));
  }
  const std::vector<int64_t> expected = scales_shape(sizes);
  if (info.shape != expected) {
    return fmt::format("{} is {}, {} has {} blocks of 128 x 128", scale, shape_text(info.shape),
                       shape_text(sizes), shape_text(expected));
  }
  if (!at::isfinite(reader_.load(scale)).all().item<bool>()) {
    return fmt::format("{} holds values that are not finite", scale);
  }
  return "";
}

at::Tensor HfWeights::load(const std::string& name) const {
  const auto& sizes = shape(name);
  return sizes.empty() ? reader_.load(name) : load_rows(name, 0, sizes[0]);
}

at::Tensor HfWeights::load_rows(const std::string& name, int64_t first, int64_t count) const {
  if (const std::string what = problem(name); !what.empty()) {
    fail_user("{}: {}; fetch it again", path().string(), what);
  }
  const at::Tensor rows = reader_.load_rows(name, first, count);
  if (!quantized_.contains(name)) return rows;
  const int64_t block = first / kQuantizationBlock;
  const at::Tensor scales = reader_.load_rows(name + kScaleSuffix, block,
                                              ceil_div(first + count, kQuantizationBlock) - block);
  return dequantize(rows, scales, first - block * kQuantizationBlock);
}

bool HfWeights::equal(const std::string& a, const std::string& b) const {
  const auto &info_a = reader_.info(a), &info_b = reader_.info(b);
  if (info_a.shape != info_b.shape) return false;
  if (info_a.dtype == info_b.dtype && !quantized_.contains(a)) {
    return reader_.checksum(a) == reader_.checksum(b);
  }
  return at::equal(load(a).to(at::kDouble), load(b).to(at::kDouble));
}

}  // namespace longhaul::checkpoint
