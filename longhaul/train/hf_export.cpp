#include "longhaul/train/hf_export.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "longhaul/base/error.h"
#include "longhaul/base/json.h"
#include "longhaul/base/log.h"
#include "longhaul/checkpoint/fp8_blocks.h"
#include "longhaul/checkpoint/part_gather.h"
#include "longhaul/models/deepseek_v3/hf_adapter.h"
#include "longhaul/train/resume.h"

namespace longhaul::train {
namespace {

constexpr const char* kCarried[] = {"generation_config.json",
                                    "tokenizer.json",
                                    "tokenizer_config.json",
                                    "special_tokens_map.json",
                                    "added_tokens.json",
                                    "vocab.json",
                                    "merges.txt",
                                    "tokenizer.model",
                                    "chat_template.jinja"};
constexpr const char* kConfig = "config.json";
constexpr const char* kRemembered[] = {kConfig, "generation_config.json"};
// What a model comes with.
constexpr const char* kExpected[] = {kConfig, "generation_config.json", "tokenizer.json",
                                     "tokenizer_config.json"};

// Of the keys of a config.json that deepseek_v3::to_hf_json() leaves out, always or of some models,
// how those begin that say what the model computes or how its files are read: another model's would
// be wrong.
constexpr const char* kOfTheModel[] = {"auto_map",
                                       "compression_config",
                                       "dtype",
                                       "index",
                                       "layer_types",
                                       "mlp_",
                                       "partial_rotary_factor",
                                       "qk_",
                                       "quantization_config",
                                       "rope_",
                                       "sliding_window",
                                       "topk_",
                                       "torch_dtype"};

bool is_of_the_model(const std::string& key) {
  return std::any_of(std::begin(kOfTheModel), std::end(kOfTheModel),
                     [&](const char* begin) { return key.starts_with(begin); });
}

// Names of the copies of our parameter `name`, but for those that are parameters themselves.
std::vector<std::string> copies_of(const std::string& name,
                                   const std::vector<deepseek_v3::MtpCopy>& copies,
                                   const checkpoint::TensorMap& tensors) {
  std::vector<std::string> found;
  for (const auto& [copy, original] : copies) {
    if (original == name && !tensors.contains(copy)) found.push_back(copy);
  }
  return found;
}

// What our parameter `name` is in the folder.
std::vector<std::pair<std::string, at::Tensor>> views_of(const std::string& name,
                                                         const at::Tensor& tensor,
                                                         const std::vector<std::string>& copies) {
  auto views = deepseek_v3::hf_views(name, tensor);
  for (const auto& copy : copies) views.emplace_back(copy, tensor);
  return views;
}

// The tensors of the folder that a view becomes.
std::vector<safetensors::TensorInfo> planned(const std::string& name, const at::Tensor& view,
                                             bool fp8) {
  const auto plan = [](const std::string& of, at::IntArrayRef sizes, at::ScalarType dtype) {
    return checkpoint::describe_shape(of, at::empty(sizes, at::device(at::kMeta).dtype(dtype)));
  };
  const auto dtype = fp8 ? deepseek_v3::published_dtype(name) : view.scalar_type();
  if (dtype != at::kFloat8_e4m3fn) return {plan(name, view.sizes(), dtype)};
  return {plan(name + checkpoint::kScaleSuffix, checkpoint::scales_shape(view.sizes()), at::kFloat),
          plan(name, view.sizes(), dtype)};
}

// What is written of each of our parameters.
std::vector<checkpoint::HfItem> items_of(const checkpoint::Snapshot& weights,
                                         const std::vector<deepseek_v3::MtpCopy>& copies,
                                         bool fp8) {
  std::vector<checkpoint::HfItem> items;
  for (const auto& [name, tensor] : weights.tensors) {
    checkpoint::HfItem item{name, {}};
    const auto shape = at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
    for (const auto& [hf_name, view] :
         views_of(name, shape, copies_of(name, copies, weights.tensors))) {
      for (auto& info : planned(hf_name, view, fp8)) item.tensors.push_back(info);
    }
    items.push_back(std::move(item));
  }
  return items;
}

// Without memory for a mask.
bool is_finite_in_fp32(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  const auto [least, most] = at::aminmax(tensor);
  const double limit = std::numeric_limits<float>::max();
  return least.item<double>() >= -limit && most.item<double>() <= limit;
}

// A tensor of an FP8 folder, of the view that it is planned for.
at::Tensor encode_fp8(const safetensors::TensorInfo& info, const at::Tensor& view) {
  const bool is_scales = info.name.ends_with(checkpoint::kScaleSuffix);
  const auto dtype = checkpoint::to_scalar_type(info.dtype);
  const bool quantized = is_scales || dtype == at::kFloat8_e4m3fn;
  // They are as finite as the largest magnitudes.
  const at::Tensor scales = quantized ? checkpoint::block_scales(view) : at::Tensor();
  if (!is_finite_in_fp32(quantized ? scales : view)) {
    fail_user(
        "{} holds values that are not finite in float32, and is not written as part of an FP8 "
        "folder; take an older checkpoint",
        is_scales ? info.name.substr(0, info.name.rfind(checkpoint::kScaleSuffix)) : info.name);
  }
  if (is_scales) return scales;
  return quantized ? checkpoint::quantize(view, scales) : view.to(dtype);
}

std::optional<std::string> read_asset(const fs::path& assets, const char* name) {
  std::error_code ignored;
  if (assets.empty() || !fs::is_regular_file(assets / name, ignored)) return std::nullopt;
  return read_file(assets / name);
}

std::optional<std::string> asset_text(const HfExportOptions& options, const char* name) {
  if (auto text = read_asset(options.assets, name)) return text;
  const auto remembered = options.texts.find(name);
  return remembered == options.texts.end() ? std::nullopt : std::optional(remembered->second);
}

// The config.json of the assets; an empty object if there is none.
nlohmann::json their_config(const HfExportOptions& options) {
  const auto text = asset_text(options, kConfig);
  if (!text) return nlohmann::json::object();
  const std::string path = (options.assets / kConfig).string();
  auto theirs = parse_json(*text, path);
  if (!theirs.is_object()) fail_user("{}: expected a JSON object; fetch the file again", path);
  return theirs;
}

std::string config_json(const deepseek_v3::ModelConfig& config, at::ScalarType dtype,
                        const HfExportOptions& options) {
  auto json = nlohmann::ordered_json::parse(deepseek_v3::to_hf_json(config));
  json["torch_dtype"] = dtype == at::kBFloat16 ? "bfloat16"
                        : dtype == at::kHalf   ? "float16"
                        : dtype == at::kDouble ? "float64"
                                               : "float32";
  if (options.fp8) json["quantization_config"] = checkpoint::quantization_config();
  const auto theirs = their_config(options);
  for (const auto& [key, value] : theirs.items()) {
    if (!json.contains(key) && !is_of_the_model(key)) json[key] = value;
  }
  return json.dump(2) + "\n";
}

void warn_of_absent(const HfExportOptions& options) {
  std::vector<std::string> absent;
  for (const char* name : kExpected) {
    if (!asset_text(options, name)) absent.emplace_back(name);
  }
  const std::string names = fmt::format("{}", fmt::join(absent, ", "));
  const std::string why =
      options.assets.empty()
          ? fmt::format("nothing says where there are {}", names)
          : fmt::format("there are no {} in '{}'", names, fs::absolute(options.assets).string());
  log::warn("the Hugging Face folder has no tokenizer: {}; longhaul convert takes them by --assets",
            why);
}

std::map<std::string, std::string> carried_texts(const HfExportOptions& options) {
  std::map<std::string, std::string> texts;
  for (const char* name : kCarried) {
    if (const auto text = asset_text(options, name)) texts[name] = *text;
  }
  if (!texts.contains("tokenizer.json") && !texts.contains("tokenizer.model")) {
    warn_of_absent(options);
  }
  return texts;
}

}  // namespace

std::map<std::string, std::string> remembered_texts(const fs::path& assets) {
  std::map<std::string, std::string> texts;
  for (const char* name : kRemembered) {
    const auto text = read_asset(assets, name);
    if (!text) continue;
    const auto json = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
    if (json.is_object()) texts[name] = *text;
  }
  return texts;
}

void check_assets(const fs::path& assets) { their_config({.assets = assets}); }

void export_hf(const fs::path& folder, const checkpoint::Snapshot& weights,
               const deepseek_v3::ModelConfig& config, const HfExportOptions& options) {
  const auto copies = deepseek_v3::mtp_copies(config);
  checkpoint::HfFolder contents;
  contents.items = items_of(weights, copies, options.fp8);
  std::optional<checkpoint::PartPlan> plan;
  at::Tensor gathered;  // what this rank writes next
  if (!weights.parts.empty()) {
    LONGHAUL_CHECK(options.ranks != nullptr, "parts are put together by ranks, and there are none");
    plan.emplace(weights, *options.ranks);
    contents.gather = [&](const std::vector<std::string>& written) {
      gathered = checkpoint::gather_parts(*plan, weights, *options.ranks, written);
    };
  }
  contents.fetch = [&](const checkpoint::HfItem& item) {
    const at::Tensor tensor = plan            ? std::exchange(gathered, {})
                              : weights.fetch ? weights.fetch(item.name)
                                              : weights.tensors.at(item.name);
    std::vector<at::Tensor> tensors;
    for (const auto& [name, view] :
         views_of(item.name, tensor, copies_of(item.name, copies, weights.tensors))) {
      tensors.insert(tensors.end(), planned(name, view, options.fp8).size(), view);
    }
    return tensors;
  };
  if (options.fp8) contents.encode = encode_fp8;
  contents.texts = [&] {
    const auto dtype =
        options.fp8 ? at::kBFloat16 : weights.tensors.at("lm_head.weight").scalar_type();
    const std::string own = config_json(config, dtype, options);
    auto texts = carried_texts(options);
    texts[kConfig] = own;
    return texts;
  };
  const int64_t total = checkpoint::total_bytes(contents);
  const auto progress = [&](int64_t bytes) {
    if (options.progress) options.progress(bytes, total);
  };
  checkpoint::write_hf_folder(
      folder, contents,
      {.max_shard_bytes = options.max_shard_bytes,
       .replace = options.replace,
       .clears = [](const std::string& name) { return checkpoint::step_of_export(name) >= 0; },
       .ranks = options.ranks,
       .progress = progress});
}

fs::path hf_folder(const JobConfig& config, int64_t step) {
  return checkpoint::export_path(checkpoint_folder(config), step);
}

std::optional<at::ScalarType> export_dtype(const JobConfig& config) {
  if (config.checkpoint.export_dtype == "bfloat16") return at::kBFloat16;
  if (config.checkpoint.export_dtype == "float16") return at::kHalf;
  return std::nullopt;
}

bool exports_fp8(const JobConfig& config) {
  return config.checkpoint.export_dtype == "float8_e4m3fn";
}

at::Tensor to_dtype(const std::string& name, const at::Tensor& tensor, at::ScalarType dtype) {
  const at::Tensor converted = tensor.to(dtype);
  if (dtype == at::kHalf && tensor.scalar_type() != at::kHalf &&
      !at::isfinite(converted).all().item<bool>()) {
    fail_user("{} holds values above 65504, the largest of float16; take bfloat16", name);
  }
  return converted;
}

}  // namespace longhaul::train
