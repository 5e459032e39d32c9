// `longhaul config show | check | keys`: job files without training.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "longhaul/base/error.h"
#include "longhaul/cli/commands.h"
#include "longhaul/config/capability.h"
#include "longhaul/config/degrees.h"
#include "longhaul/config/load.h"
#include "longhaul/config/write.h"
#include "longhaul/data/file_list.h"
#include "longhaul/train/preflight.h"
#include "longhaul/train/resolve_model.h"

namespace longhaul::cli {
namespace {

void print_shape(const ResolvedModel& model) {
  fmt::print("\n# the model's shape, from {}\n", model.source);
  const auto shape = nlohmann::ordered_json::parse(deepseek_v3::to_hf_json(model.shape));
  for (const auto& [key, value] : shape.items()) fmt::print("{:<24} = {}\n", key, value.dump());
}

void show(const CLI::App& command, bool changed) {
  const JobConfig config = load_command_line(command.remaining()).config;
  fmt::print("{}", show_values(config, changed));
  try {
    print_shape(resolve_model(config));
  } catch (const UserError& error) {
    fmt::print("\n# the model's shape is not known: {}\n", error.what());
  }
}

void print_remarks(const char* title, const std::vector<Remark>& remarks) {
  if (remarks.empty()) return;
  fmt::print("{}:\n", title);
  for (const auto& remark : remarks) fmt::print("  {}\n", remark.line());
}

struct NamedPath {
  const char* key;
  std::optional<std::string> path;
  bool is_list = false;
};

// Paths that do not exist here; a job file is often checked on another machine than it runs on.
void print_missing_paths(const JobConfig& config) {
  std::vector<NamedPath> paths = {{"model.hf_assets_path", config.model.hf_assets_path},
                                  {"training.dataset_path", config.training.dataset_path, true}};
  for (const auto& part : config.training.mix) paths.push_back({"training.mix", part.path, true});
  if (config.validation.enable) {
    paths.push_back({"validation.dataset_path", config.validation.dataset_path, true});
  }
  if (config.checkpoint.enable) {
    paths.push_back({"checkpoint.initial_load_path", config.checkpoint.initial_load_path});
  }
  std::string lines;
  for (const auto& [key, path, is_list] : paths) {
    if (!path) continue;
    for (const auto& part : is_list ? data::split_paths(*path) : Strings{*path}) {
      if (is_list ? data::stands_for_something(part) : std::filesystem::exists(part)) continue;
      lines += fmt::format("  {}: {}: {}\n", config.origin_of(key).text(), key, part);
    }
  }
  if (!lines.empty()) fmt::print("paths that do not exist on this machine:\n{}", lines);
}

// The lists come first, so that one run shows everything; what is wrong is thrown last.
void check(const CLI::App& command, std::optional<int64_t> ranks) {
  // CLI11 hands over the words it does not know, in order: the job file and the overrides.
  const auto [config, file] = load_command_line(command.remaining());
  const auto missing = missing_behaviour(config, ranks.value_or(1));
  print_remarks("not supported yet, training would refuse", missing);
  print_remarks("notes", notes(config));
  print_missing_paths(config);
  const ResolvedModel model = resolve_model(config);
  if (missing.empty()) train::check_job(config, ranks.value_or(1));
  fmt::print("model: {}\n", model.source);
  if (ranks) fmt::print("{}\n", check_degrees(config, *ranks));
  fmt::print("{}: the file is valid; {}\n", file.empty() ? "defaults" : file,
             missing.empty() ? "training would accept it"
                             : fmt::format("{} setting{} not supported yet", missing.size(),
                                           missing.size() == 1 ? " is" : "s are"));
}

void add_show(CLI::App& config) {
  auto* command = config.add_subcommand(
      "show",
      "Every value of a job with its origin\n  longhaul config show [job.toml] [--changed] "
      "[--section.key value ...]");
  command->allow_extras();
  auto changed = std::make_shared<bool>(false);
  command->add_flag("--changed", *changed, "Only values that differ from the default");
  command->footer("Example:\n  longhaul config show job.toml --changed --training.steps 100");
  command->callback([command, changed] { show(*command, *changed); });
}

void add_check(CLI::App& config) {
  auto* command = config.add_subcommand(
      "check",
      "What is wrong with a job file or not supported yet; no path needs to exist\n  "
      "longhaul config check [job.toml] [--ranks N] [--section.key value ...]");
  command->allow_extras();
  auto ranks = std::make_shared<std::optional<int64_t>>();
  command->add_option("--ranks", *ranks, "Also check the parallel degrees for N ranks");
  command->footer("Example:\n  longhaul config check job.toml --ranks 8");
  command->callback([command, ranks] { check(*command, *ranks); });
}

void add_keys(CLI::App& config) {
  auto* command = config.add_subcommand("keys", "All keys: type, default, range, meaning");
  auto markdown = std::make_shared<bool>(false);
  auto prefix = std::make_shared<std::string>();
  command->add_flag("--markdown", *markdown, "As the page docs/config.md");
  command->add_option("prefix", *prefix, "Only keys that begin with this, e.g. training");
  command->footer("Example:\n  longhaul config keys training");
  command->callback(
      [markdown, prefix] { fmt::print("{}", *markdown ? keys_markdown() : keys_text(*prefix)); });
}

}  // namespace

void add_config_command(CLI::App& app) {
  auto* config = app.add_subcommand("config", "Look at job files without training");
  config->require_subcommand(1);
  config->footer("Example:\n  longhaul config check job.toml");
  add_show(*config);
  add_check(*config);
  add_keys(*config);
}

}  // namespace longhaul::cli
