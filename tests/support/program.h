// Runs the built program as a user does and keeps what it printed and its exit status.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/temp_folder.h"

namespace longhaul::test {

struct ProgramResult {
  int status = -1;  // exit status; -1 if it was killed or could not be started
  std::string out, err;
};

// `longhaul words...` in `folder` (the current one if empty).
inline ProgramResult run_longhaul(const std::vector<std::string>& words,
                                  const std::string& folder = "") {
  const char* binary = std::getenv("LONGHAUL_BINARY");
  if (!binary) {
    ADD_FAILURE() << "set LONGHAUL_BINARY to the program, or run the test through ctest";
    return {};
  }
  TempFolder captured;
  const std::string out = captured / "out", err = captured / "err";
  std::vector<std::string> all = {binary};
  all.insert(all.end(), words.begin(), words.end());
  std::vector<char*> arguments;
  for (auto& word : all) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    dup2(open("/dev/null", O_RDONLY), 0);
    dup2(open(out.c_str(), O_CREAT | O_WRONLY, 0600), 1);
    dup2(open(err.c_str(), O_CREAT | O_WRONLY, 0600), 2);
    if (folder.empty() || chdir(folder.c_str()) == 0) execv(binary, arguments.data());
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, slurp(out), slurp(err)};
}

}  // namespace longhaul::test
