#include "longhaul/train/resolve_model.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"
#include "longhaul/config/names.h"

namespace longhaul {
namespace {

using deepseek_v3::ModelConfig;

void check_name(const JobConfig& config) {
  const auto names = model_names();
  if (std::find(names.begin(), names.end(), config.model.name) != names.end()) return;
  fail_setting(config, "model.name",
               fmt::format("\"{}\" cannot be trained; set it to {}", config.model.name,
                           fmt::join(names, " or ")));
}

std::string config_json_path(const JobConfig& config) {
  return (fs::path(config.model.hf_assets_path) / "config.json").string();
}

std::optional<std::string> read_text(const std::string& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return std::nullopt;
  return read_file(path);
}

ModelConfig flavor_shape(const JobConfig& config) {
  return name_setting(config, "model.flavor", [&] {
    return deepseek_v3::find_flavor(config.model.name, config.model.flavor);
  });
}

// A folder whose config.json describes another model is most often the wrong folder.
void warn_if_different(const JobConfig& config, const ModelConfig& flavor) {
  const std::string path = config_json_path(config);
  const auto text = read_text(path);
  if (!text) return;
  try {
    if (deepseek_v3::parse_model_config(*text, path) == flavor) return;
    log::warn("{} describes another shape than the flavor {}; the flavor counts", path,
              config.model.flavor);
  } catch (const UserError& error) {
    log::warn("not used, the flavor {} counts: {}", config.model.flavor, error.what());
  }
}

// deepseek_v32 is deepseek_v3 with an indexer; a shape of the other kind is not what was asked for.
void check_architecture(const JobConfig& config, const ResolvedModel& model) {
  const bool wants_indexer = config.model.name == "deepseek_v32";
  if (model.shape.has_indexer() == wants_indexer) return;
  fail_user("{}: {} a lightning indexer, but model.name is {} ({}); set it to {}", model.source,
            wants_indexer ? "has no" : "has", config.model.name,
            config.origin_of("model.name").text(), wants_indexer ? "deepseek_v3" : "deepseek_v32");
}

ResolvedModel choose_shape(const JobConfig& config) {
  const Origin named = config.origin_of("model.flavor");
  const std::string label =
      fmt::format("flavor {}/{} ({})", config.model.name, config.model.flavor, named.text());
  if (named.kind != Origin::Kind::kDefault) {
    const ModelConfig shape = flavor_shape(config);
    warn_if_different(config, shape);
    return {shape, label};
  }
  const std::string path = config_json_path(config);
  if (const auto text = read_text(path)) {
    return {deepseek_v3::parse_model_config(*text, path), path};
  }
  return {flavor_shape(config), label};
}

}  // namespace

ResolvedModel resolve_model(const JobConfig& config) {
  check_name(config);
  ResolvedModel model = choose_shape(config);
  check_architecture(config, model);
  if (config.mtp.num_modules) model.shape.num_nextn_predict_layers = *config.mtp.num_modules;
  if (config.model.init_std) model.shape.initializer_range = *config.model.init_std;
  return model;
}

}  // namespace longhaul
