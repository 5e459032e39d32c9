// `longhaul eval`: loss and bits per byte on a corpus, beside baselines if wanted.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "longhaul/base/file.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"
#include "longhaul/cli/commands.h"
#include "longhaul/cli/job.h"
#include "longhaul/train/bigram.h"
#include "longhaul/train/data_source.h"
#include "longhaul/train/resolve_model.h"
#include "longhaul/train/summary.h"
#include "longhaul/train/trained_model.h"
#include "longhaul/train/validation.h"

namespace longhaul::cli {
namespace {

struct EvalOptions {
  std::string data, checkpoint;
  bool baselines = false, json = false;
};

struct Line {
  std::string name;
  train::ValidationResult result;
};

nlohmann::ordered_json to_json(const std::vector<Line>& lines) {
  auto models = nlohmann::ordered_json::array();
  for (const auto& [name, result] : lines) {
    nlohmann::ordered_json model = {
        {"name", name}, {"loss", result.loss}, {"tokens", result.labels}};
    if (result.bits_per_byte) model["bits_per_byte"] = *result.bits_per_byte;
    models.push_back(model);
  }
  return {{"models", models}};
}

void print_table(const std::vector<Line>& lines) {
  fmt::print("{:<24}{:>12}{:>16}{:>14}\n", "model", "loss", "bits per byte", "tokens");
  for (const auto& [name, result] : lines) {
    const std::string bits =
        result.bits_per_byte ? fmt::format("{:.3f}", *result.bits_per_byte) : "-";
    fmt::print("{:<24}{:>12.4f}{:>16}{:>14}\n", name, result.loss, bits,
               with_commas(result.labels));
  }
}

std::vector<Line> evaluate(const JobConfig& config, const EvalOptions& options) {
  const auto shape = resolve_model(config).shape;
  const auto held_out = open_data(
      train::validation_data(config, shape.vocab_size, shape.num_nextn_predict_layers), config);
  const train::ValidationOptions how{.batch_size = config.validation.local_batch_size,
                                     .max_batches = config.validation.steps};
  const auto trained = train::load_trained_model(config, options.checkpoint);
  log::info("weights from {}", trained.source);
  std::vector<Line> lines = {{"this model", train::validate(*trained.model, *held_out, how)}};
  if (!options.baselines) return lines;
  const auto training = open_data(train::training_data(config, shape.vocab_size, 0), config);
  train::check_same_tokenizer(*training, *held_out, "validation.dataset_path", config);
  const int64_t rows = how.max_batches < 0 ? -1 : how.max_batches * how.batch_size;
  lines.push_back({"bigram", train::bigram_baseline(*training, *held_out, shape.vocab_size, rows)});
  lines.push_back(
      {"untrained model", train::validate(*train::untrained_model(config).model, *held_out, how)});
  return lines;
}

void run(const CLI::App& command, const EvalOptions& options) {
  JobConfig config = load_job_of(command).config;
  if (!options.data.empty()) {
    config.origins["validation.dataset_path"] = {Origin::Kind::kCommandLine, "", 0};
    config.validation.dataset_path = options.data;
    if (config.validation.dataset == "c4_validation") config.validation.dataset = "files";
  }
  const auto lines = evaluate(config, options);
  if (options.baselines) {
    const std::filesystem::path folder = config.job.dump_folder;
    create_folders(folder);
    write_atomic(folder / "evaluation.json", to_json(lines).dump(2) + "\n");
    train::write_summary(folder);
  }
  if (options.json) {
    fmt::print("{}\n", to_json(lines).dump());
  } else {
    print_table(lines);
  }
}

}  // namespace

void add_eval_command(CLI::App& app) {
  auto* command = app.add_subcommand("eval",
                                     "Loss and bits per byte of a job's model on its validation "
                                     "data, or on --data\n  longhaul eval "
                                     "job.toml [options] [--section.key value ...]");
  command->allow_extras();
  auto options = std::make_shared<EvalOptions>();
  command->add_option("--data", options->data, "Files to evaluate on: a folder, a file or a list");
  command->add_option(
      "--checkpoint", options->checkpoint,
      "A step folder or a Hugging Face folder (default: the run's newest sound one)");
  command->add_flag("--baselines", options->baselines,
                    "Also a bigram model over the training data, and the model before training; "
                    "kept in the run folder's evaluation.json and summary.md");
  command->add_flag("--json", options->json, "One JSON object instead of a table");
  command->footer("Example:\n  longhaul eval configs/quickstart.toml --baselines");
  command->callback([command, options] { run(*command, *options); });
}

}  // namespace longhaul::cli
