#include "longhaul/train/convert.h"

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/checkpoint/locate.h"
#include "longhaul/config/load.h"
#include "longhaul/data/utf8.h"
#include "longhaul/train/hf_export.h"
#include "longhaul/train/hf_import.h"
#include "longhaul/train/trainer.h"

namespace longhaul::train {
namespace {

using checkpoint::CheckpointReader;
using checkpoint::HfWeights;
using checkpoint::Snapshot;
using deepseek_v3::ModelConfig;

constexpr const char* kModelConfig = "model_config";   // in a manifest's trainer
constexpr const char* kAssetsPath = "hf_assets_path";  // likewise; absolute
constexpr const char* kAssetsTexts = "hf_texts";       // likewise; of its small files

ModelConfig read_config(const fs::path& path) {
  return deepseek_v3::parse_model_config(read_file(path), path.string());
}

// The model without memory, for its names and shapes.
deepseek_v3::Model shapes_of(const ModelConfig& config, bool own_norm) {
  deepseek_v3::ModelSettings settings;
  settings.parameters_on_meta = true;
  settings.mtp_own_norm = own_norm;
  return {config, settings};
}

// N of a path that ends in step-N.
int64_t step_of(const fs::path& step_folder) {
  const int64_t step = checkpoint::step_of(step_folder.filename().string());
  if (step < 0) {
    fail_user("'{}' is no name of a checkpoint; name a step folder, such as '{}'",
              step_folder.string(), (step_folder / "step-0").string());
  }
  return step;
}

fs::path without_slash(const fs::path& path) {
  return path.has_filename() ? path : path.parent_path();
}

// Whether the MTP layers have norms that are not the trunk's.
bool has_own_norms(const HfWeights& weights, const ModelConfig& config) {
  const auto names = weights.names();
  const auto has = [&](const std::string& name) {
    return std::binary_search(names.begin(), names.end(), name);
  };
  const auto copies = deepseek_v3::mtp_copies(config);
  return std::any_of(copies.begin(), copies.end(), [&](const auto& pair) {
    return pair.original == "model.norm.weight" && has(pair.copy) && has(pair.original) &&
           !weights.equal(pair.copy, pair.original);
  });
}

// The tensors that make up our parameter.
std::vector<std::string> hf_names(const nn::NamedParameter& parameter) {
  std::vector<std::string> names;
  for (const auto& [name, view] :
       deepseek_v3::hf_views(parameter.name, parameter.tensor->detach())) {
    names.push_back(name);
  }
  return names;
}

at::ScalarType dtype_of(const HfWeights& weights, const std::vector<std::string>& names) {
  std::optional<at::ScalarType> dtype;
  for (const auto& name : names) {
    const auto own = weights.quantized().contains(name) ? at::kBFloat16 : weights.dtype(name);
    dtype = dtype ? c10::promoteTypes(*dtype, own) : own;
  }
  return *dtype;
}

// A parameter's whole contents: one tensor, or the experts' stacked.
at::Tensor assemble(const HfWeights& weights, const nn::NamedParameter& parameter,
                    at::ScalarType dtype) {
  const auto names = hf_names(parameter);
  if (!deepseek_v3::is_routed_expert(parameter.name)) {
    return to_dtype(names[0], weights.load(names[0]), dtype);
  }
  at::Tensor stacked = at::empty(parameter.tensor->sizes(), at::device(at::kCPU).dtype(dtype));
  for (size_t e = 0; e < names.size(); ++e) {
    stacked[static_cast<int64_t>(e)].copy_(to_dtype(names[e], weights.load(names[e]), dtype));
  }
  return stacked;
}

int64_t total_bytes(const checkpoint::TensorMap& tensors) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

fs::path config_path_of(const HfWeights& weights, const ConvertOptions& options) {
  const fs::path& from = weights.path();
  const fs::path beside = (fs::is_directory(from) ? from : from.parent_path()) / "config.json";
  const fs::path path = options.config.empty() ? beside : options.config;
  if (!fs::exists(path)) {
    fail_user("'{}' does not exist; name the model's config.json with --config", path.string());
  }
  return path;
}

// Shapes, and a way to their contents; refers to all that it is given.
Snapshot snapshot_of(const HfWeights& weights, const deepseek_v3::Model& model,
                     const ConvertOptions& options) {
  Snapshot snapshot{.step = 0, .model_only = true, .tensors = {}, .fetch = {}};
  std::map<std::string, std::pair<nn::NamedParameter, at::ScalarType>> states;
  for (const auto& parameter : model.parameters()) {
    const auto dtype = options.dtype.value_or(dtype_of(weights, hf_names(parameter)));
    states.emplace(parameter.name, std::pair(parameter, dtype));
  }
  for (const auto& bias : model.buffers()) {
    states.emplace(bias.name, std::pair(bias, weights.dtype(bias.name)));
  }
  for (const auto& [name, state] : states) {
    const auto& [parameter, dtype] = state;
    snapshot.tensors[name] =
        at::empty(parameter.tensor->sizes(), at::device(at::kMeta).dtype(dtype));
  }
  snapshot.fetch = [&weights, &options, states, done = int64_t{0},
                    total = total_bytes(snapshot.tensors)](const std::string& name) mutable {
    const auto& [parameter, dtype] = states.at(name);
    const at::Tensor tensor = assemble(weights, parameter, dtype);
    done += static_cast<int64_t>(tensor.nbytes());
    if (options.progress) options.progress(done, total);
    return tensor;
  };
  return snapshot;
}

// For the way back, from wherever that is. A manifest holds UTF-8 only.
std::string assets_to_remember(const fs::path& config_path, const ConvertOptions& options) {
  const std::string assets =
      fs::absolute(options.assets.empty() ? config_path.parent_path() : options.assets).string();
  if (!data::is_valid_utf8(assets)) {
    fail_user(
        "'{}', the folder of the tokenizer's files, is not UTF-8 text; rename it, or name another "
        "with --assets",
        assets);
  }
  return assets;
}

void import_weights(const fs::path& from, const fs::path& to, const ConvertOptions& options) {
  if (options.dtype == at::kFloat8_e4m3fn) {
    fail_user(
        "'{}': a step folder is never FP8, which has too few digits to train on; leave --dtype out "
        "(bfloat16 for what is FP8), or take float32",
        to.string());
  }
  const int64_t step = step_of(to);
  const HfWeights weights(from);
  const fs::path config_path = config_path_of(weights, options);
  const ModelConfig config = read_config(config_path);
  const std::string assets = assets_to_remember(config_path, options);
  const bool own_norm = has_own_norms(weights, config);
  auto model = shapes_of(config, own_norm);
  auto source = hf_source(weights);
  source.remedy = "name the config.json that belongs to it with --config";
  deepseek_v3::check_hf(model, source);
  if (own_norm) {
    log::info("the MTP layers have norms of their own: train with mtp.own_norm = true");
  }
  Snapshot snapshot = snapshot_of(weights, model, options);
  snapshot.step = step;
  snapshot.trainer = {{"step", step},
                      {kModelConfig, deepseek_v3::to_hf_json(config)},
                      {kAssetsPath, assets},
                      {kAssetsTexts, remembered_texts(assets)}};
  checkpoint::save(fs::absolute(to).parent_path(), snapshot);
}

ModelConfig config_of(const CheckpointReader& reader, const ConvertOptions& options) {
  if (!options.config.empty()) return read_config(options.config);
  const auto& trainer = reader.manifest().trainer;
  const auto found = trainer.find(kModelConfig);
  if (found == trainer.end() || !found->is_string()) {
    fail_user("{}: its manifest does not say what model it is; name a config.json with --config",
              reader.path().string());
  }
  return deepseek_v3::parse_model_config(found->get<std::string>(),
                                         reader.path().string() + ": " + kModelConfig);
}

fs::path assets_of(const CheckpointReader& reader, const ConvertOptions& options) {
  if (!options.assets.empty()) return options.assets;
  const auto& trainer = reader.manifest().trainer;
  if (trainer.contains(kAssetsPath)) return trainer[kAssetsPath].get<std::string>();
  // Of an earlier version.
  if (!trainer.contains("job")) return {};
  try {
    return parse_job(trainer["job"].get<std::string>(), "its job").model.hf_assets_path;
  } catch (const UserError& error) {
    log::warn("the job that made the weights does not say where its tokenizer is: {}",
              error.what());
    return {};
  }
}

std::map<std::string, std::string> texts_of(const CheckpointReader& reader) {
  return reader.manifest().trainer.value(kAssetsTexts, std::map<std::string, std::string>());
}

// Compared with its checksum, of which there is one of the whole contents.
at::Tensor load_checked(const CheckpointReader& reader, const std::string& name) {
  const at::Tensor tensor = reader.load(name);
  if (hash_hex(tensor.const_data_ptr(), tensor.nbytes()) != reader.checksum(name)) {
    fail_user("{}: {} does not match its checksum; take another checkpoint", reader.path().string(),
              name);
  }
  return tensor;
}

void export_weights(const fs::path& from, const fs::path& to, const ConvertOptions& options) {
  const CheckpointReader reader(from);
  const ModelConfig config = config_of(reader, options);
  const auto copies = deepseek_v3::mtp_copies(config);
  const auto names = reader.names();
  const bool own_norm = std::any_of(copies.begin(), copies.end(), [&](const auto& pair) {
    return std::binary_search(names.begin(), names.end(), pair.copy);
  });
  const auto model = shapes_of(config, own_norm);
  if (const std::string misfits = find_misfits(model, reader); !misfits.empty()) {
    fail_user("{} does not fit its model: {}; name the config.json it was made with by --config",
              from.string(), misfits);
  }
  const bool fp8 = options.dtype == at::kFloat8_e4m3fn;
  Snapshot weights{.step = reader.manifest().step, .model_only = true, .tensors = {}, .fetch = {}};
  const auto add = [&](const std::string& name, std::optional<at::ScalarType> dtype) {
    const auto& info = reader.info(name);
    weights.tensors[name] = at::empty(
        info.shape,
        at::device(at::kMeta).dtype(dtype.value_or(checkpoint::to_scalar_type(info.dtype))));
  };
  for (const auto& parameter : model.parameters()) {
    add(parameter.name, fp8 ? std::nullopt : options.dtype);
  }
  for (const auto& bias : model.buffers()) add(bias.name, std::nullopt);
  weights.fetch = [&](const std::string& name) {
    return to_dtype(name, load_checked(reader, name), weights.tensors.at(name).scalar_type());
  };
  export_hf(to, weights, config,
            {.assets = assets_of(reader, options),
             .texts = texts_of(reader),
             .fp8 = fp8,
             .max_shard_bytes = options.max_shard_bytes,
             .progress = options.progress});
}

}  // namespace

void convert(const fs::path& from, const fs::path& to, const ConvertOptions& options) {
  const auto source = checkpoint::locate(without_slash(from));
  const fs::path target = without_slash(to);
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(target, ignored))) {
    fail_user("'{}' is there already; move it away or name another folder", target.string());
  }
  source.ours ? export_weights(source.path, target, options)
              : import_weights(source.path, target, options);
}

}  // namespace longhaul::train
