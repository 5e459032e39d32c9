// `longhaul data prepare | inspect`. Results go to stdout or a folder, progress and remarks to
// stderr; errors are thrown for main to print.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/log.h"
#include "longhaul/base/progress.h"
#include "longhaul/base/text.h"
#include "longhaul/cli/commands.h"
#include "longhaul/cli/corpus_options.h"
#include "longhaul/data/prepare.h"
#include "longhaul/data/statistics.h"

namespace longhaul::cli {
namespace {

struct Arguments {
  CorpusOptions corpus;
  std::string tokenizer, output;
  int threads = 2;
  uint64_t shard_mb = 256;
  size_t sample_tokens = 256;
};

void prepare(const Arguments& arguments) {
  const auto tokenizer = data::Tokenizer::load(arguments.tokenizer);
  std::unique_ptr<ProgressLine> line;
  const auto [prepared, kept_shards, bad] =
      data::prepare(arguments.corpus.input, tokenizer, arguments.output,
                    {.documents = arguments.corpus.documents(),
                     .shard_bytes = arguments.shard_mb * 1'000'000,
                     .num_threads = arguments.threads,
                     .progress = progress_of(line, "preparing")});
  if (line) line->finish();
  uint64_t documents = 0, tokens = 0;
  for (const auto& shard : prepared.shards) {
    documents += shard.documents;
    tokens += shard.tokens;
  }
  if (bad > 0) log::warn("{} bad documents are left out", with_commas(bad));
  log::info("{}: {} documents, {} tokens in {} shards, {} of them there before", arguments.output,
            with_commas(static_cast<int64_t>(documents)), with_commas(static_cast<int64_t>(tokens)),
            prepared.shards.size(), kept_shards);
}

void print_row(const char* name, const std::string& value) {
  fmt::print("{:<24}{:>16}\n", name, value);
}

void print_statistics(const data::CorpusStatistics& statistics) {
  for (const auto& [format, files] : statistics.files) {
    print_row(("files of " + format).c_str(), with_commas(files.count));
    print_row("  on the disk", human_bytes(static_cast<double>(files.bytes)));
  }
  print_row("documents", with_commas(statistics.documents));
  print_row("  duplicates", with_commas(statistics.duplicates));
  print_row("  empty, left out", with_commas(statistics.empty_documents));
  print_row("  bad, left out", with_commas(statistics.bad_documents));
  print_row("  repaired", with_commas(statistics.replaced_documents));
  print_row("text", human_bytes(static_cast<double>(statistics.text_bytes)));
  print_row("tokens", with_commas(statistics.tokens));
  if (statistics.text_bytes > 0) {
    print_row("tokens a byte",
              fmt::format("{:.4f}", static_cast<double>(statistics.tokens) /
                                        static_cast<double>(statistics.text_bytes)));
  }
  const std::pair<const char*, double> shares[] = {
      {"length, shortest", 0}, {"  median", 0.5}, {"  of 9 in 10 up to", 0.9}, {"  longest", 1}};
  for (const auto& [name, share] : shares) {
    print_row(name, with_commas(statistics.length_at(share)));
  }
}

// The sample's documents, each behind a line with its number.
void print_sample(const data::CorpusStatistics& statistics, const data::Tokenizer& tokenizer) {
  const std::span<const int32_t> ids = statistics.sample;
  fmt::print("\nthe first {} tokens, decoded:\n", ids.size());
  size_t begin = 0;
  const auto print = [&](size_t number, size_t end, const char* remark) {
    fmt::print("----- document {}: {} tokens{}\n{}\n", number, end - begin, remark,
               tokenizer.decode(ids.subspan(begin, end - begin)));
    begin = end;
  };
  const auto& ends = statistics.sample_ends;
  for (size_t i = 0; i < ends.size(); ++i) print(i + 1, ends[i], "");
  if (begin < ids.size()) print(ends.size() + 1, ids.size(), ", cut here");
}

void inspect(const Arguments& arguments) {
  const auto options = arguments.corpus.documents();
  data::BadDocuments bad(options.skip_bad);
  const auto sources = data::list_sources(arguments.corpus.input, options, bad);
  std::optional<data::Tokenizer> tokenizer;
  if (!arguments.tokenizer.empty()) tokenizer = data::Tokenizer::load(arguments.tokenizer);
  if (sources.needs_tokenizer() && !tokenizer) {
    fail_user("text is counted in tokens: give --tokenizer, a tokenizer.json or its folder");
  }
  if (tokenizer && sources.vocabulary &&
      sources.vocabulary->fingerprint != tokenizer->fingerprint()) {
    fail_user("'{}' was prepared with another tokenizer than '{}'", arguments.corpus.input,
              arguments.tokenizer);
  }
  std::unique_ptr<ProgressLine> line;
  const auto statistics = data::collect(sources, tokenizer ? &*tokenizer : nullptr,
                                        {.documents = options,
                                         .num_threads = arguments.threads,
                                         .sample_tokens = arguments.sample_tokens,
                                         .progress = progress_of(line, "reading")},
                                        bad);
  if (line) line->finish();
  print_statistics(statistics);
  if (statistics.documents == 0) {
    fail_user("all documents of the corpus are bad or empty ({} bad)",
              with_commas(statistics.bad_documents));
  }
  if (tokenizer) print_sample(statistics, *tokenizer);
}

void add_reading_options(CLI::App& command, Arguments& arguments) {
  add_corpus_options(command, "input", arguments.corpus);
  command.add_option("--threads", arguments.threads, "Threads that read and tokenise")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
}

void add_prepare(CLI::App& parent) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = parent.add_subcommand(
      "prepare", "Tokenise a corpus once, into a folder that training.dataset_path may name");
  add_reading_options(*command, *arguments);
  command->add_option("--tokenizer", arguments->tokenizer, "A tokenizer.json or its folder")
      ->required();
  command
      ->add_option("--output", arguments->output,
                   "The folder to write; the same command goes on with one that is not finished")
      ->required();
  command->add_option("--shard-mb", arguments->shard_mb, "MB of text in a shard, about")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 20))
      ->capture_default_str();
  command->footer(
      "Example:\n  longhaul data prepare corpus/ --tokenizer tokenizer.json --output tokens/");
  command->callback([arguments] { prepare(*arguments); });
}

void add_inspect(CLI::App& parent) {
  auto arguments = std::make_shared<Arguments>();
  arguments->corpus.bad_documents = "skip";
  CLI::App* command = parent.add_subcommand(
      "inspect",
      "What is in a corpus: counts, lengths, duplicates, a sample; of prepared tokens "
      "also whether they are sound");
  add_reading_options(*command, *arguments);
  command->add_option("--tokenizer", arguments->tokenizer,
                      "A tokenizer.json or its folder; prepared tokens are only not decoded "
                      "without it");
  command->add_option("--sample-tokens", arguments->sample_tokens, "Tokens to show")
      ->capture_default_str();
  command->footer("Example:\n  longhaul data inspect corpus/ --tokenizer tokenizer.json");
  command->callback([arguments] { inspect(*arguments); });
}

}  // namespace

void add_data_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("data", "Prepare corpora and look into them");
  command->require_subcommand(1);
  command->footer("Example:\n  longhaul data inspect corpus/ --tokenizer tokenizer.json");
  add_prepare(*command);
  add_inspect(*command);
}

}  // namespace longhaul::cli
