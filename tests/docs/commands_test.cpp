// Every command that the documents show is run as written, in a folder where
// configs/quickstart.toml is made small. Commands that install, build or measure are not run: their
// script, preset or benchmark must exist.
#include <algorithm>
#include <regex>

#include "tests/cli/small_job.h"
#include "tests/support/source_folder.h"

namespace longhaul {
namespace {

const fs::path kSource = longhaul::test::source_folder();

// The commands of a page's ```sh blocks in order, continued lines joined, comments cut off.
std::vector<std::string> commands_of(const std::string& page) {
  std::istringstream lines(page);
  std::vector<std::string> commands;
  std::string command;
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("```")) {
      inside = line == "```sh";
      continue;
    }
    if (!inside || line.empty()) continue;
    command += std::regex_replace(line, std::regex(R"( *#.*$)"), "");
    if (command.ends_with('\\')) {
      command.pop_back();
    } else {
      commands.push_back(std::exchange(command, ""));
    }
  }
  return commands;
}

// The quickstart's job for the flavor `tiny` and small rows; everything else stays as it is.
std::string small_quickstart() {
  std::string job = test::slurp(kSource / "configs/quickstart.toml");
  const std::pair<const char*, const char*> changes[] = {{"flavor", "\"tiny\""},
                                                         {"seq_len", "64"},
                                                         {"local_batch_size", "2"},
                                                         {"steps", "3"},
                                                         {"warmup_steps", "1"}};
  for (const auto& [key, value] : changes) {
    const std::regex line("(^|\n)" + std::string(key) + " = [^\n]*");
    EXPECT_TRUE(std::regex_search(job, line)) << key;
    job = std::regex_replace(job, line, "$1" + std::string(key) + " = " + value);
  }
  return job;
}

class Commands : public ::testing::Test {
 protected:
  Commands() {
    fs::create_directories(folder_ / "configs");
    test::spill(folder_ / "configs/quickstart.toml", small_quickstart());
    test::write_corpus(folder_ / "runs/quickstart/corpus");
    fs::create_directories(folder_ / "runs/quickstart/tokenizer");
    test::spill(folder_ / "runs/quickstart/tokenizer/tokenizer.json", test::small_tokenizer());
    fs::create_directories(folder_ / "build/release");
    fs::create_directory_symlink(fs::path(test::longhaul_binary()).parent_path(),
                                 folder_ / "build/release/bin");
  }

  // Empty, or what is wrong.
  std::string check(const std::string& command) const;
  std::string run(const std::string& command) const;
  static std::string check_preset(const std::string& command);

  test::TempFolder folder_;
};

std::string Commands::check(const std::string& command) const {
  std::smatch match;
  if (std::regex_match(command, std::regex(R"((build/release/bin/)?longhaul .*|echo .*)"))) {
    return run(command);
  }
  if (command.starts_with("cmake ")) return check_preset(command);
  // A script, perhaps in "$(...)" for the program that it prints, and words after it.
  static const std::regex script(R"re((?:"\$\()?((?:scripts|bench)/[\w/]+\.sh)(?:\)")?)re"
                                 R"re(((?: [\w/.]+)*)(?: --json)?)re");
  if (!std::regex_match(command, match, script)) return "this test has no check for it";
  const std::string path = match[1];
  if (::access((kSource / path).c_str(), X_OK) != 0)
    return path + " is not there or not executable";
  std::istringstream names(match[2]);
  if (std::string preset; path == "scripts/build.sh" && names >> preset) {
    return check_preset("--preset " + preset);  // targets follow
  }
  for (std::string name; names >> name;) {
    const auto file = path == "scripts/bench.sh" ? "bench/" + name + ".py" : name;
    if (!fs::exists(kSource / file)) return file + " is not there";
  }
  return "";
}

std::string Commands::run(const std::string& command) const {
  const std::string path = "PATH=" + (folder_ / "build/release/bin").string() + ":/usr/bin:/bin";
  const auto result =
      test::shell(command, {.folder = folder_.path(),
                            .environment = {path, "OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=passive"},
                            .out = {},
                            .err = {}});
  return result.status == 0 ? "" : result.err + result.out;
}

std::string Commands::check_preset(const std::string& command) {
  const std::string presets = test::slurp(kSource / "CMakePresets.json");
  static const std::regex preset(R"(--preset (\w+))");
  std::sregex_iterator it(command.begin(), command.end(), preset), end;
  if (it == end) return "names no preset";
  for (; it != end; ++it) {
    if (presets.find("\"name\": \"" + (*it)[1].str() + "\"") == std::string::npos) {
      return "there is no preset " + (*it)[1].str();
    }
  }
  return "";
}

TEST_F(Commands, ThoseOfTheDocumentsRunAsWritten) {
  // A reader meets the pages in this order, and later commands need what earlier ones make.
  int checked = 0;
  for (const char* page :
       {"README.md", "docs/start.md", "docs/tokenizers.md", "docs/data.md", "docs/checkpoints.md",
        "docs/parallelism.md", "docs/hugging_face.md", "docs/results.md", "docs/step.md",
        "docs/operators.md", "docs/benchmarks.md"}) {
    for (const auto& command : commands_of(test::slurp(kSource / page))) {
      const std::string wrong = check(command);
      EXPECT_EQ(wrong, "") << page << ": " << command;
      ++checked;
    }
  }
  EXPECT_GT(checked, 15);
}

TEST_F(Commands, AWrongOneIsFound) {
  EXPECT_NE(check("longhaul train configs/none.toml"), "");
  EXPECT_NE(check("longhaul no_such_command"), "");
  EXPECT_NE(check("cmake --preset fastest"), "");
  EXPECT_NE(check("scripts/none.sh"), "");
  EXPECT_NE(check("scripts/bench.sh none"), "");
  EXPECT_NE(check("rm -rf runs"), "");
  EXPECT_EQ(commands_of("```sh\na \\\n  b  # why\n```\n```text\nc\n```\n"),
            std::vector<std::string>{"a   b"});
}

}  // namespace
}  // namespace longhaul
