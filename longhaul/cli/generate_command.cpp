// `longhaul generate`: text from a trained model, printed as it comes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "longhaul/base/error.h"
#include "longhaul/cli/commands.h"
#include "longhaul/cli/job.h"
#include "longhaul/train/data_source.h"
#include "longhaul/train/generate.h"
#include "longhaul/train/trained_model.h"

namespace longhaul::cli {
namespace {

struct Options {
  std::string prompt, checkpoint;
  train::GenerateOptions generate;
};

// Prints what is new in the text, holding back bytes that are not a whole character yet.
class Printer {
 public:
  explicit Printer(const data::Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void add(int32_t token) {
    pending_.push_back(token);
    const std::string text = tokenizer_.decode(pending_);
    if (text.ends_with("\xEF\xBF\xBD")) return;
    print(text);
  }
  void finish() { print(tokenizer_.decode(pending_) + "\n"); }

 private:
  void print(const std::string& text) {
    fmt::print("{}", text);
    std::fflush(stdout);
    pending_.clear();
  }

  const data::Tokenizer& tokenizer_;
  std::vector<int32_t> pending_;
};

void run(const CLI::App& command, Options options) {
  const JobConfig config = load_job_of(command).config;
  const data::Tokenizer tokenizer = train::load_tokenizer(config);
  auto prompt = tokenizer.encode(options.prompt);
  options.generate.stop_token = tokenizer.eos_id().value_or(-1);
  if (prompt.empty() && tokenizer.eos_id()) prompt = {*tokenizer.eos_id()};
  if (prompt.empty()) fail_user("--prompt is empty, and the tokenizer has no end-of-text token");
  const auto trained = train::load_trained_model(config, options.checkpoint);
  train::check_tokenizer_fits(tokenizer, trained.model->config().vocab_size);
  options.generate.may_draw = [&](int32_t id) { return tokenizer.contains(id); };
  options.generate.max_context = config.training.seq_len;
  fmt::print("{}", options.prompt);
  Printer printer(tokenizer);
  train::generate(*trained.model, prompt, options.generate,
                  [&](int32_t token) { printer.add(token); });
  printer.finish();
}

}  // namespace

void add_generate_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "generate",
      "Continue a text with a job's trained model\n  longhaul generate job.toml --prompt TEXT "
      "[options] [--section.key value ...]");
  command->allow_extras();
  auto options = std::make_shared<Options>();
  auto& how = options->generate;
  command->add_option("--prompt", options->prompt, "The text to continue");
  command->add_option(
      "--checkpoint", options->checkpoint,
      "A step folder or a Hugging Face folder (default: the run's newest sound one)");
  command->add_option("--max-new-tokens", how.max_new_tokens, "At most this many")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--temperature", how.temperature, "0: always the likeliest token")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-p", how.top_p, "Only the likeliest tokens of this mass together")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--seed", how.seed, "Of the draws")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->footer(
      "Example:\n  longhaul generate configs/quickstart.toml --prompt 'def ' --temperature 0.8 "
      "--top-p 0.95");
  command->callback([command, options] { run(*command, *options); });
}

}  // namespace longhaul::cli
