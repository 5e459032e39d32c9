// A thread that says nothing: of the ranks of a job only the first talks, and a rank is a thread or
// a process's only one. Errors are said all the same.
#pragma once

namespace longhaul {

// While one with `quiet` lives, this thread's log lines below errors and its progress lines are
// left out.
class Quiet {
 public:
  explicit Quiet(bool quiet);
  ~Quiet();
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  const bool before_;
};

bool is_quiet();

}  // namespace longhaul
