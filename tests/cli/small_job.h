// A job that the program finishes in a second: thirty short texts, a tokenizer of 320 tokens, the
// flavor `tiny`, six steps. Each test has its own folder; run folders in it are named by the test.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <nlohmann/json.hpp>

#include "longhaul/base/file.h"
#include "tests/support/program.h"
#include "tests/support/temp_folder.h"

namespace longhaul::test {

using Words = std::vector<std::string>;

// Sentences from a small vocabulary, the same at each call.
inline std::string small_text(unsigned seed) {
  const char* const words[] = {"the",  "quick", "model",  "reads", "a",     "long",
                               "text", "and",   "learns", "what",  "comes", "next"};
  std::string text;
  for (int i = 0; i < 240; ++i) {
    seed = seed * 1664525u + 1013904223u;
    text += words[(seed >> 16) % 12];
    text += i % 12 == 11 ? ".\n" : " ";
  }
  return text;
}

inline void write_corpus(const fs::path& folder) {
  for (unsigned i = 0; i < 30; ++i) {
    const fs::path part = folder / (i % 6 == 0 ? "validation" : "train");
    fs::create_directories(part);
    spill(part / (std::to_string(i) + ".txt"), small_text(i + 1));
  }
}

inline const char* const kSmallJob = R"([job]
dump_folder = "run"
[model]
name = "deepseek_v32"
flavor = "tiny"
hf_assets_path = "tokenizer"
[training]
dataset = "files"
dataset_path = "corpus/train"
seq_len = 64
local_batch_size = 2
steps = 6
mixed_precision_param = "float32"
device = "cpu"
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = 2
[validation]
enable = true
dataset = "files"
dataset_path = "corpus/validation"
seq_len = 64
local_batch_size = 4
steps = 2
freq = 3
[checkpoint]
enable = true
interval = 2
[metrics]
log_freq = 1
)";

// The tokenizer.json that `longhaul tokenizer train` makes of the corpus; made once.
inline const std::string& small_tokenizer() {
  static const std::string text = [] {
    const TempFolder folder;
    write_corpus(folder / "corpus");
    run_longhaul({"tokenizer", "train", "--input", "corpus/train", "--vocab-size", "320",
                  "--output", "new/tokenizer.json"},
                 folder.path());
    return slurp(folder / "new/tokenizer.json");
  }();
  return text;
}

class SmallJob : public ::testing::Test {
 protected:
  SmallJob() {
    write_corpus(folder_ / "corpus");
    fs::create_directory(folder_ / "tokenizer");
    spill(folder_ / "tokenizer/tokenizer.json", small_tokenizer());
    spill(folder_ / "job.toml", kSmallJob);
  }

  fs::path path(const std::string& name) const { return folder_ / name; }

  // One thread is quickest for so small a model, and with the settings of malloc that the program
  // would restart itself for it need not start twice.
  ProgramOptions here(Words environment = {}) const {
    environment.insert(environment.end(),
                       {"OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=passive",
                        "MALLOC_TRIM_THRESHOLD_=281474976710656", "MALLOC_TOP_PAD_=67108864"});
    return {.folder = folder_.path(), .environment = environment, .out = {}, .err = {}};
  }
  ProgramResult run(const Words& words, const Words& environment = {}) const {
    return Program(words, here(environment)).wait();
  }
  // `longhaul train job.toml more...`.
  ProgramResult train(const Words& more = {}, const Words& environment = {}) const {
    return run(train_words(more), environment);
  }
  static Words train_words(const Words& more) {
    Words words = {"train", "job.toml"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  // Without validation and checkpoints, for tests of something else.
  ProgramResult train_only(Words more = {}) const {
    more.insert(more.begin(), {"--validation.no_enable", "--checkpoint.no_enable"});
    return train(more);
  }
  void expect_trained(const ProgramResult& result) const {
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_THAT(result.err, ::testing::HasSubstr("finished ")) << result.err;
  }

  std::vector<nlohmann::json> metrics(const std::string& run_folder = "run") const {
    std::vector<nlohmann::json> objects;
    std::ifstream in(path(run_folder) / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) objects.push_back(nlohmann::json::parse(line));
    return objects;
  }
  // The lines of metrics.jsonl without what depends on the clock or the memory.
  Words figures(const std::string& run_folder = "run") const {
    Words lines;
    for (auto object : metrics(run_folder)) {
      for (const char* key : {"tokens_per_second", "mfu", "memory_peak_bytes", "time"}) {
        EXPECT_EQ(object.erase(key), 1u) << key;
      }
      for (const char* key : {"seconds", "memory"}) object.erase(key);
      lines.push_back(object.dump());
    }
    return lines;
  }

  TempFolder folder_;
};

// What the program writes to a terminal as its stderr; "" if no terminal can be opened here.
inline std::string on_a_terminal(const Words& words, ProgramOptions options) {
  const FileDescriptor terminal(posix_openpt(O_RDWR | O_NOCTTY));
  if (!terminal.valid() || grantpt(terminal.get()) != 0 || unlockpt(terminal.get()) != 0) return "";
  options.err = ptsname(terminal.get());
  const FileDescriptor other_end = open_file(options.err, O_RDWR | O_NOCTTY, "open");
  Program program(words, options);
  std::string text;
  pollfd readable = {terminal.get(), POLLIN, 0};
  // Read while it runs: a terminal holds only 4 KiB.
  for (bool running = true; running || poll(&readable, 1, 0) == 1;) {
    running = program.running();
    if (poll(&readable, 1, /*ms=*/20) != 1) continue;
    char part[4096];
    const ssize_t size = read(terminal.get(), part, sizeof part);
    if (size <= 0) break;
    text.append(part, static_cast<size_t>(size));
  }
  return text;
}

// An error of a user's: exit status 2, and exactly one line of it that holds all of `parts`.
inline void expect_user_error(const ProgramResult& result, const Words& parts, int status = 2) {
  EXPECT_EQ(result.status, status) << result.err;
  const size_t at = result.err.rfind("error: ");
  ASSERT_NE(at, std::string::npos) << result.err;
  const std::string line = result.err.substr(at);
  EXPECT_EQ(line.find('\n'), line.size() - 1) << line;
  for (const auto& part : parts) EXPECT_THAT(line, ::testing::HasSubstr(part));
}

}  // namespace longhaul::test
