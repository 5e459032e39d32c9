#include "longhaul/base/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <iostream>

#include "longhaul/base/quiet.h"
#include "longhaul/base/text.h"

namespace longhaul {
namespace {

constexpr double kTerminalInterval = 0.1, kPlainInterval = 10.0;  // seconds
constexpr const char* kEraseLine = "\r\x1b[2K";
constexpr const char *kDim = "\x1b[2m", *kPlain = "\x1b[0m";

// A line on the terminal awaits its end. A terminal has one last line, so a process has one of
// these.
std::atomic<bool> line_is_open = false;
static_assert(std::atomic<bool>::is_always_lock_free);  // a signal handler reads it

// Of the terminal at stderr; 0 if it is none, or does not say.
size_t terminal_columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

}  // namespace

ProgressLine::Output ProgressLine::standard_error() {
  const char* no_color = std::getenv("NO_COLOR");
  const char* term = std::getenv("TERM");
  const bool quiet = is_quiet();
  const bool terminal =
      !quiet && isatty(STDERR_FILENO) == 1 && !(term && std::string(term) == "dumb");
  return {.write =
              [quiet](const std::string& text) {
                if (!quiet) std::cerr << text << std::flush;
              },
          .seconds =
              [] {
                const auto now = std::chrono::steady_clock::now().time_since_epoch();
                return std::chrono::duration<double>(now).count();
              },
          .terminal = terminal,
          .color = terminal && !(no_color && *no_color)};
}

ProgressLine::ProgressLine(std::string label, int64_t total, Unit unit, Output output)
    : label_(std::move(label)),
      total_(total),
      unit_(unit),
      output_(std::move(output)),
      started_(output_.seconds()),
      next_(started_ + (output_.terminal ? kTerminalInterval : kPlainInterval)) {}

ProgressLine::~ProgressLine() {
  if (output_.terminal && line_is_open.exchange(false)) output_.write("\n");
}

void ProgressLine::erase_open_line() {
  if (line_is_open.exchange(false)) std::cerr << kEraseLine << std::flush;
}

std::string_view ProgressLine::erasure() { return standard_error().terminal ? kEraseLine : ""; }

void ProgressLine::leave_terminal_sane() {
  if (!line_is_open.exchange(false)) return;
  constexpr char kEnd[] = "\x1b[0m\n";
  // A terminal that takes nothing cannot be helped.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kEnd, sizeof kEnd - 1);
}

void ProgressLine::update(int64_t done, const std::string& detail) {
  const std::lock_guard lock(mutex_);
  done_ = done;
  const double now = output_.seconds();
  if (finished_ || now < next_) return;
  next_ = now + (output_.terminal ? kTerminalInterval : kPlainInterval);
  show(text(done, now - started_, detail), false);
}

void ProgressLine::finish() {
  const std::lock_guard lock(mutex_);
  if (finished_) return;
  finished_ = true;
  const double elapsed = output_.seconds() - started_;
  const std::string rate =
      elapsed > 0 ? fmt::format(", {}/s", amount(static_cast<int64_t>(done_ / elapsed))) : "";
  show(fmt::format("{}: {} in {}{}", label_, amount(done_), human_seconds(elapsed), rate), true);
}

std::string ProgressLine::amount(int64_t value) const {
  return unit_ == Unit::kBytes ? human_bytes(static_cast<double>(value)) : with_commas(value);
}

std::string ProgressLine::text(int64_t done, double elapsed, const std::string& detail) const {
  const double rate = elapsed > 0 ? static_cast<double>(done) / elapsed : 0;
  std::string line = fmt::format("{}: {}", label_, amount(done));
  if (total_ > 0) {
    line += fmt::format(" of {} ({:.0f}%)", amount(total_),
                        100.0 * static_cast<double>(done) / static_cast<double>(total_));
  }
  std::string details =
      ", " + (detail.empty() ? amount(static_cast<int64_t>(rate)) + "/s" : detail);
  if (detail.empty() && total_ > 0 && rate > 0) {
    details += fmt::format(", {} left", human_seconds(static_cast<double>(total_ - done) / rate));
  }
  // A line that wraps could not be erased.
  if (const size_t columns = output_.terminal ? terminal_columns() : 0; columns > 1) {
    line = line.substr(0, columns - 1);
    details = details.substr(0, columns - 1 - line.size());
  }
  return output_.color ? line + kDim + details + kPlain : line + details;
}

void ProgressLine::show(const std::string& line, bool last) {
  // Open before it is seen: a signal may come while it is written.
  if (output_.terminal) line_is_open = true;
  output_.write((output_.terminal ? kEraseLine : "") + line +
                (last || !output_.terminal ? "\n" : ""));
  if (output_.terminal && last) line_is_open = false;
}

}  // namespace longhaul
