// One line that says how far a long job is. On a terminal it is rewritten in place (at most ten
// times a second, with rate and time left); elsewhere it is a plain line every ten seconds and one
// at the end. Goes to stderr and knows nothing of what it counts. Called by commands and trainers.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

namespace longhaul {

class ProgressLine {
 public:
  enum class Unit { kCount, kBytes };

  // Where lines go and what time it is; tests bring their own.
  struct Output {
    std::function<void(const std::string&)> write;
    std::function<double()> seconds;  // monotonic
    bool terminal = false;
    bool color = false;
  };
  static Output standard_error();

  // total 0: unknown, so neither percentage nor time left.
  ProgressLine(std::string label, int64_t total, Unit unit, Output output = standard_error());
  // Ends the line; without finish() it keeps the last state shown.
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // `done` out of the total; cheap enough for tight loops, may be called from several threads.
  // `detail` stands where rate and time left would.
  void update(int64_t done, const std::string& detail = "");
  // The last line: what was done, how long it took and the mean rate. Later calls do nothing.
  void finish();

  // Erases the line that is open on the terminal, if one is, so that another text can take its
  // place; the next update writes it anew. The logger does so before each of its lines.
  static void erase_open_line();

  // What erases the line that another process may hold open on the terminal at stderr, for a text
  // to begin with that would run into it; "" if there is no terminal. The launcher of ranks shares
  // its terminal with one of them.
  static std::string_view erasure();

  // Ends the open line, if one is, and resets colours; the shell's prompt then stands on a line of
  // its own. For a process that dies: safe in a signal handler.
  static void leave_terminal_sane();

 private:
  std::string text(int64_t done, double elapsed, const std::string& detail) const;
  std::string amount(int64_t value) const;
  void show(const std::string& line, bool last);

  const std::string label_;
  const int64_t total_;
  const Unit unit_;
  const Output output_;
  const double started_;
  std::mutex mutex_;
  double next_;  // earliest time of the next line
  int64_t done_ = 0;
  bool finished_ = false;
};

}  // namespace longhaul
