// `longhaul convert`: weights between Hugging Face's folders and step folders of ours.
#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <optional>

#include "longhaul/base/log.h"
#include "longhaul/base/progress.h"
#include "longhaul/cli/commands.h"
#include "longhaul/train/convert.h"

namespace longhaul::cli {
namespace {

struct ConvertArguments {
  std::string from, to, dtype, config, assets;
  uint64_t max_shard_bytes = static_cast<uint64_t>(train::ConvertOptions{}.max_shard_bytes);
};

void convert(const ConvertArguments& arguments) {
  static const std::map<std::string, at::ScalarType> dtypes = {
      {"float32", at::kFloat},
      {"bfloat16", at::kBFloat16},
      {"float16", at::kHalf},
      {"float8_e4m3fn", at::kFloat8_e4m3fn}};
  train::ConvertOptions options;
  if (!arguments.dtype.empty()) options.dtype = dtypes.at(arguments.dtype);
  options.config = arguments.config;
  options.assets = arguments.assets;
  options.max_shard_bytes = narrow<int64_t>(arguments.max_shard_bytes);
  std::optional<ProgressLine> line;
  options.progress = [&](int64_t done, int64_t total) {
    if (!line) line.emplace("converting", total, ProgressLine::Unit::kBytes);
    line->update(done);
  };
  train::convert(arguments.from, arguments.to, options);
  if (line) line->finish();
  log::info("wrote {}", arguments.to);
}

}  // namespace

void add_convert_command(CLI::App& app) {
  auto* command =
      app.add_subcommand("convert", "Weights from a Hugging Face folder to a step folder, or back");
  auto arguments = std::make_shared<ConvertArguments>();
  command
      ->add_option("from", arguments->from,
                   "A Hugging Face folder or .safetensors file (FP8 blocks, too), a step-N folder, "
                   "or a folder of them (the newest)")
      ->required();
  command
      ->add_option("to", arguments->to,
                   "What to write: of a Hugging Face folder a step folder, such as weights/step-0; "
                   "of a step folder a Hugging Face folder")
      ->required();
  command
      ->add_option("--dtype", arguments->dtype,
                   "Type of the weights; without it as they are, and bfloat16 for FP8. "
                   "float8_e4m3fn: a Hugging Face folder as DeepSeek publishes them")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16", "float8_e4m3fn"}));
  command->add_option("--config", arguments->config,
                      "The model's config.json, instead of the one that comes with the weights");
  command->add_option("--assets", arguments->assets,
                      "Folder of the tokenizer's files and generation_config.json");
  command
      ->add_option("--max-shard-size", arguments->max_shard_bytes,
                   "Largest .safetensors file of a Hugging Face folder, such as 5GB")
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::PositiveNumber);
  command->footer(
      "Example:\n  longhaul convert DeepSeek-V3.2 weights/step-0\n"
      "  longhaul convert outputs/checkpoint/step-100 exported --dtype bfloat16");
  command->callback([arguments] { convert(*arguments); });
}

}  // namespace longhaul::cli
