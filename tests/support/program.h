// Runs the built program as a user does and keeps what it printed and its exit status.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/temp_folder.h"

namespace longhaul::test {

struct ProgramResult {
  int status = -1;     // exit status; -1 if it was killed or could not be started
  int killed_by = -1;  // the signal
  std::string out, err;
};

struct ProgramOptions {
  std::string folder;                    // to run in; the current one if empty
  std::vector<std::string> environment;  // "NAME=value", beside the test's own
  std::string out, err;                  // files that stdout and stderr go to instead of being kept
};

// The built program's path; a failure of the test if it is not known.
inline std::string longhaul_binary() {
  const char* binary = std::getenv("LONGHAUL_BINARY");
  if (!binary) {
    ADD_FAILURE() << "set LONGHAUL_BINARY to the program, or run the test through ctest";
  }
  return binary ? binary : "";
}

// `longhaul words...`, running beside the test; `executable` puts another program in its place.
class Program {
 public:
  explicit Program(const std::vector<std::string>& words, const ProgramOptions& options = {},
                   const std::string& executable = longhaul_binary()) {
    if (executable.empty()) return;
    std::vector<std::string> all = {executable}, settings = options.environment;
    all.insert(all.end(), words.begin(), words.end());
    std::vector<char*> arguments;
    for (auto& word : all) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const std::string out = options.out.empty() ? (captured_ / "out").string() : options.out;
    const std::string err = options.err.empty() ? (captured_ / "err").string() : options.err;
    child_ = fork();
    if (child_ != 0) return;
    for (auto& setting : settings) putenv(setting.data());
    dup2(open("/dev/null", O_RDONLY), 0);
    dup2(open(out.c_str(), O_CREAT | O_WRONLY, 0600), 1);
    dup2(open(err.c_str(), O_CREAT | O_WRONLY, 0600), 2);
    if (options.folder.empty() || chdir(options.folder.c_str()) == 0) {
      execv(executable.c_str(), arguments.data());
    }
    _exit(127);
  }
  Program(const Program&) = delete;
  ~Program() {
    if (child_ <= 0 || waited_) return;
    ::kill(child_, SIGKILL);
    wait();
  }

  void signal(int number) const { ::kill(child_, number); }

  pid_t pid() const { return child_; }

  // False once it has ended.
  bool running() {
    if (child_ > 0 && !waited_ && waitpid(child_, &wait_status_, WNOHANG) == child_) waited_ = true;
    return child_ > 0 && !waited_;
  }

  ProgramResult wait() {
    if (child_ <= 0) return {};
    if (!waited_) waitpid(child_, &wait_status_, 0);
    waited_ = true;
    return {WIFEXITED(wait_status_) ? WEXITSTATUS(wait_status_) : -1,
            WIFSIGNALED(wait_status_) ? WTERMSIG(wait_status_) : -1, slurp(captured_ / "out"),
            slurp(captured_ / "err")};
  }

 private:
  TempFolder captured_;
  pid_t child_ = -1;
  int wait_status_ = 0;
  bool waited_ = false;
};

// `longhaul words...` in `folder` (the current one if empty), to its end.
inline ProgramResult run_longhaul(const std::vector<std::string>& words,
                                  const std::string& folder = "") {
  return Program(words, {.folder = folder, .environment = {}, .out = {}, .err = {}}).wait();
}

// `bash -c command` to its end.
inline ProgramResult shell(const std::string& command, const ProgramOptions& options = {}) {
  return Program({"-c", command}, options, "/bin/bash").wait();
}

// The results of several commands that have nothing to do with each other, two at a time: most of
// a short command is the loading of libraries.
inline std::vector<ProgramResult> run_all(const std::vector<std::vector<std::string>>& commands,
                                          const ProgramOptions& options = {}) {
  std::vector<ProgramResult> results;
  for (size_t i = 0; i < commands.size(); i += 2) {
    Program first(commands[i], options);
    if (i + 1 == commands.size()) {
      results.push_back(first.wait());
      break;
    }
    Program second(commands[i + 1], options);
    results.push_back(first.wait());
    results.push_back(second.wait());
  }
  return results;
}

// What the program must say of fp32 products on this machine, by the system's word.
inline std::string expected_fp32_kernels() {
  const std::string cpu = slurp("/proc/cpuinfo");
  if (cpu.find(" avx512f") == std::string::npos) return "MKL: the CPU has no AVX-512 for oneDNN";
  return cpu.find("GenuineIntel") == std::string::npos
             ? "oneDNN"
             : "MKL, small ones by oneDNN: faster on Intel's CPUs";
}

}  // namespace longhaul::test
