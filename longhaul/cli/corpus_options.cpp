#include "longhaul/cli/corpus_options.h"

#include <CLI/CLI.hpp>

namespace longhaul::cli {

data::DocumentOptions CorpusOptions::documents() const {
  return {.text_field = text_field,
          .on_invalid =
              invalid_text == "replace" ? data::InvalidText::kReplace : data::InvalidText::kStop,
          .skip_bad = bad_documents == "skip"};
}

void add_corpus_options(CLI::App& command, const char* input_name, CorpusOptions& options) {
  command
      .add_option(input_name, options.input, "A folder, a file, a glob or a comma separated list")
      ->required();
  command
      .add_option("--text-field", options.text_field,
                  "The field of JSONL rows and column of Parquet files that holds the text")
      ->capture_default_str();
  command
      .add_option("--invalid-text", options.invalid_text,
                  "On a NUL byte or broken UTF-8: stop, or replace it by U+FFFD")
      ->check(CLI::IsMember({"stop", "replace"}))
      ->capture_default_str();
  command
      .add_option("--bad-documents", options.bad_documents,
                  "On a document that cannot be read: error, or skip it with a warning")
      ->check(CLI::IsMember({"error", "skip"}))
      ->capture_default_str();
}

std::function<void(int64_t, int64_t)> progress_of(std::unique_ptr<ProgressLine>& line,
                                                  const char* label) {
  return [&line, label](int64_t done, int64_t total) {
    if (!line) line = std::make_unique<ProgressLine>(label, total, ProgressLine::Unit::kBytes);
    line->update(done);
  };
}

}  // namespace longhaul::cli
