// `longhaul tokenizer train | encode | decode`. Results go to stdout or a file, progress and
// remarks to stderr; errors are thrown for main to print.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/base/log.h"
#include "longhaul/base/progress.h"
#include "longhaul/base/text.h"
#include "longhaul/base/utf8.h"
#include "longhaul/cli/corpus_options.h"
#include "longhaul/data/bpe_trainer.h"
#include "longhaul/data/document_reader.h"
#include "longhaul/data/file_list.h"
#include "longhaul/data/tokenizer.h"
#include "longhaul/data/utf8.h"

namespace longhaul::cli {
namespace {

using nlohmann::json;

struct TrainArguments {
  CorpusOptions corpus;
  std::string output;
  data::BpeTrainingOptions options;
};

data::Sources list_text(const CorpusOptions& corpus, data::BadDocuments& bad) {
  const auto files = data::list_files(corpus.input);
  if (data::total_bytes(files) == 0) {
    fail_user("all {} files in '{}' are empty", files.size(), corpus.input);
  }
  auto sources = data::list_sources(files, corpus.documents(), bad);
  if (sources.vocabulary) fail_user("'{}' holds prepared tokens, and no text", corpus.input);
  return sources;
}

// One unit after another, so that memory is bounded by the pieces that are counted.
void add_corpus(data::BpeTrainer& trainer, const CorpusOptions& corpus) {
  const auto options = corpus.documents();
  data::BadDocuments bad(options.skip_bad);
  const auto sources = list_text(corpus, bad);
  ProgressLine line("reading", static_cast<int64_t>(sources.disk_bytes()),
                    ProgressLine::Unit::kBytes);
  uint64_t done = 0;
  int64_t replaced = 0;
  data::Document document;
  for (const auto& unit : sources.units) {
    const auto reader = data::open_documents(sources.files[unit.file], unit, options, bad);
    while (reader->next(document)) {
      replaced += document.replaced ? 1 : 0;
      trainer.add_document(document.text);
      line.update(static_cast<int64_t>(done + reader->consumed()));
    }
    done += unit.disk_bytes;
    line.update(static_cast<int64_t>(done));
  }
  line.finish();
  if (bad.count() > 0) log::warn("{} bad documents are left out", with_commas(bad.count()));
  if (replaced > 0) {
    log::warn("{} documents hold NUL bytes or are not valid UTF-8; these parts read as U+FFFD",
              replaced);
  }
}

void train(const TrainArguments& arguments) {
  const fs::path output = arguments.output;
  if (fs::is_directory(output)) fail_user("'{}' is a folder; name the file", arguments.output);
  if (fs::exists(output) && !fs::is_regular_file(output)) {
    fail_user("'{}' is no regular file; name another", arguments.output);
  }
  if (output.has_parent_path()) create_folders(output.parent_path());
  data::BpeTrainer trainer(arguments.options);
  add_corpus(trainer, arguments.corpus);
  const int64_t total = arguments.options.vocab_size;
  ProgressLine line("learning merges", total, ProgressLine::Unit::kCount);
  const auto result = trainer.train([&](int64_t done, int64_t) { line.update(done); });
  line.update(result.vocab_size);
  line.finish();
  if (result.vocab_size < total) {
    log::warn("the text has too few repetitions for {} tokens: the vocabulary has {}",
              with_commas(total), with_commas(result.vocab_size));
  }
  write_atomic(arguments.output, result.json);
  log::info("wrote {} ({} tokens)", arguments.output, with_commas(result.vocab_size));
}

// A file, or standard input for "-".
class Input {
 public:
  explicit Input(const std::string& path) : name_(path == "-" ? "standard input" : path) {
    if (path == "-") return;
    if (fs::is_directory(path)) fail_file("read", path, EISDIR);
    errno = 0;
    file_.open(path, std::ios::binary);
    if (!file_) fail_file("read", path, errno);
  }

  std::istream& stream() { return file_.is_open() ? file_ : std::cin; }
  const std::string& name() const { return name_; }

  std::string whole() {
    std::ostringstream text;
    text << stream().rdbuf();
    return std::move(text).str();
  }

  // Calls `handle(line, "name:number")` for every line that is not blank.
  template <typename Handle>
  void each_line(Handle&& handle) {
    int64_t number = 0;
    for (std::string line; std::getline(stream(), line);) {
      ++number;
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      handle(line, fmt::format("{}:{}", name_, number));
    }
    if (stream().bad()) fail_user("cannot read {}", name_);
  }

 private:
  std::string name_;
  std::ifstream file_;
};

json parse_line(const std::string& line, const std::string& place) {
  const bool valid = data::is_valid_utf8(line);
  json value = json::parse(valid ? line : repair_utf8(line), nullptr, false);
  if (value.is_discarded()) fail_user("{}: not valid JSON", place);
  return value;
}

void write_ids(const std::vector<int32_t>& ids) {
  fmt::memory_buffer out;
  out.push_back('[');
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i > 0) out.push_back(',');
    fmt::format_to(std::back_inserter(out), "{}", ids[i]);
  }
  out.append(std::string_view("]\n"));
  std::cout.write(out.data(), static_cast<std::streamsize>(out.size()));
}

void flush_output() {
  if (!std::cout.flush()) fail_user("cannot write to standard output: {}", std::strerror(errno));
}

struct EncodeArguments {
  std::string tokenizer, jsonl;
  std::optional<std::string> text;
};

void encode(const EncodeArguments& arguments) {
  data::Encoder encoder(data::Tokenizer::load(arguments.tokenizer));
  std::vector<int32_t> ids;
  const auto encode_one = [&](std::string_view text) {
    ids.clear();
    encoder.encode(text, ids);
    write_ids(ids);
  };
  if (arguments.text) return encode_one(*arguments.text);
  if (arguments.jsonl.empty()) return encode_one(Input("-").whole());
  Input(arguments.jsonl).each_line([&](const std::string& line, const std::string& place) {
    const json row = parse_line(line, place);
    if (!row.is_object() || !row.contains("text") || !row["text"].is_string()) {
      fail_user("{}: expected an object with a string \"text\"", place);
    }
    encode_one(row["text"].get_ref<const std::string&>());
  });
}

std::vector<int32_t> ids_of(const json& value, int32_t vocab_size, const std::string& place) {
  if (!value.is_array()) fail_user("{}: expected an array of ids", place);
  std::vector<int32_t> ids;
  for (const json& id : value) {
    if (!id.is_number_integer() || id < 0 || id >= vocab_size) {
      fail_user("{}: {} is not an id of this tokenizer (0 to {})", place, id.dump(),
                vocab_size - 1);
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

struct DecodeArguments {
  std::string tokenizer, input = "-";
  bool plain = false;
};

void decode(const DecodeArguments& arguments) {
  const auto tokenizer = data::Tokenizer::load(arguments.tokenizer);
  Input(arguments.input).each_line([&](const std::string& line, const std::string& place) {
    const auto ids = ids_of(parse_line(line, place), tokenizer.vocab_size(), place);
    if (arguments.plain) {
      std::cout << tokenizer.decode_bytes(ids);
    } else {
      std::cout << json({{"text", tokenizer.decode(ids)}}).dump() << '\n';
    }
  });
}

void add_train(CLI::App& parent) {
  auto arguments = std::make_shared<TrainArguments>();
  arguments->options.vocab_size = 32768;
  CLI::App* command = parent.add_subcommand("train", "Learn a byte-level BPE vocabulary");
  add_corpus_options(*command, "--input", arguments->corpus);
  command
      ->add_option("--vocab-size", arguments->options.vocab_size,
                   "Tokens in all: 256 bytes, merges, special tokens")
      ->capture_default_str();
  command->add_option("--output", arguments->output, "The tokenizer.json to write")->required();
  command->footer(
      "Example:\n  longhaul tokenizer train --input src/ --vocab-size 4096 --output "
      "tokenizer.json");
  command->callback([arguments] { train(*arguments); });
}

void add_encode(CLI::App& parent) {
  auto arguments = std::make_shared<EncodeArguments>();
  CLI::App* command =
      parent.add_subcommand("encode", "Text to ids, one JSON array a text, on standard output");
  command->add_option("--tokenizer", arguments->tokenizer, "A tokenizer.json or its folder")
      ->required();
  auto* jsonl = command->add_option("--jsonl", arguments->jsonl,
                                    "Rows {\"text\": ...}, one a line ('-': standard input)");
  command->add_option("--text", arguments->text, "One text (default: all of standard input)")
      ->excludes(jsonl);
  command->footer(
      "Example:\n  longhaul tokenizer encode --tokenizer tokenizer.json --text 'hello world'");
  command->callback([arguments] {
    encode(*arguments);
    flush_output();
  });
}

void add_decode(CLI::App& parent) {
  auto arguments = std::make_shared<DecodeArguments>();
  CLI::App* command =
      parent.add_subcommand("decode", "Ids to text: JSON arrays in, {\"text\": ...} rows out");
  command->add_option("--tokenizer", arguments->tokenizer, "A tokenizer.json or its folder")
      ->required();
  command
      ->add_option("--input", arguments->input, "Arrays of ids, one a line ('-': standard input)")
      ->capture_default_str();
  command->add_flag("--plain", arguments->plain, "The bare bytes, nothing between the texts");
  command->footer(
      "Example:\n  echo '[104,105]' | longhaul tokenizer decode --tokenizer tokenizer.json");
  command->callback([arguments] {
    decode(*arguments);
    flush_output();
  });
}

}  // namespace

void add_tokenizer_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("tokenizer", "Train and use tokenizers");
  command->require_subcommand(1);
  command->footer(
      "Example:\n  longhaul tokenizer encode --tokenizer tokenizer.json --jsonl texts.jsonl");
  add_train(*command);
  add_encode(*command);
  add_decode(*command);
}

}  // namespace longhaul::cli
