#include "longhaul/base/fault.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>

#include "longhaul/base/file.h"
#include "longhaul/base/log.h"

namespace longhaul::fault {
namespace {

enum class Kind { kKill, kHang, kThrow, kNoSpace };

struct Plan {
  std::string place;
  int nth = 1;
  Kind kind = Kind::kKill;
};

Kind parse_kind(std::string_view text, std::string_view specification) {
  if (text == "kill") return Kind::kKill;
  if (text == "hang") return Kind::kHang;
  if (text == "throw") return Kind::kThrow;
  if (text == "enospc") return Kind::kNoSpace;
  fail_user("LONGHAUL_FAULT '{}': '{}' is neither a number nor kill, hang, throw or enospc",
            specification, text);
}

Plan parse_plan(std::string_view specification) {
  Plan plan;
  size_t colon = specification.find(':');
  plan.place = specification.substr(0, colon);
  if (plan.place.empty()) fail_user("LONGHAUL_FAULT '{}': it names no place", specification);
  while (colon != std::string_view::npos) {
    const size_t begin = colon + 1;
    colon = specification.find(':', begin);
    const std::string_view part =
        specification.substr(begin, colon == std::string_view::npos ? colon : colon - begin);
    const char* end = part.data() + part.size();
    int number = 0;
    const auto [stop, error] = std::from_chars(part.data(), end, number);
    if (error == std::errc() && stop == end && number > 0) {
      plan.nth = number;
    } else {
      plan.kind = parse_kind(part, specification);
    }
  }
  return plan;
}

// The one piece of process-wide state: places are visited from anywhere, and the environment is
// process-wide as well.
struct State {
  State() {
    const char* specification = std::getenv("LONGHAUL_FAULT");
    if (specification != nullptr && *specification != '\0') plan = parse_plan(specification);
    update();
  }
  void update() { active = plan.has_value() || tracing; }

  std::atomic<bool> active{false};
  std::mutex mutex;
  std::optional<Plan> plan;
  bool tracing = false;
  std::map<std::string, int, std::less<>> visits;
  std::vector<std::string> trace;
};

State& state() {
  static State instance;
  return instance;
}

[[noreturn]] void hang() {
  while (true) ::pause();
}

int fire(const Plan& plan, int nth) {
  switch (plan.kind) {
    case Kind::kKill:
      log::error("fault injection: visit {} of '{}' kills this process", nth, plan.place);
      ::kill(::getpid(), SIGKILL);
      hang();
    case Kind::kHang:
      log::error("fault injection: visit {} of '{}' hangs", nth, plan.place);
      hang();
    case Kind::kThrow:
      throw Injected(fmt::format("fault injection: visit {} of '{}'", nth, plan.place));
    case Kind::kNoSpace:
      return ENOSPC;
  }
  return 0;
}

}  // namespace

namespace detail {

int visit(std::string_view place) {
  State& s = state();
  if (!s.active.load(std::memory_order_relaxed)) [[likely]] {
    return 0;
  }
  const std::lock_guard lock(s.mutex);
  auto found = s.visits.find(place);
  if (found == s.visits.end()) found = s.visits.emplace(place, 0).first;
  const int nth = ++found->second;
  if (s.tracing) s.trace.push_back(fmt::format("{}:{}", place, nth));
  if (s.plan && s.plan->place == place && s.plan->nth == nth) return fire(*s.plan, nth);
  return 0;
}

void throw_errno(std::string_view place, int code) {
  throw FileError(code, fmt::format("{} (fault injection at '{}')",
                                    std::generic_category().message(code), place));
}

}  // namespace detail

Armed::Armed(std::string_view specification) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.plan = parse_plan(specification);
  s.visits.clear();
  s.update();
}

Armed::~Armed() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.plan.reset();
  s.update();
}

Trace::Trace() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.visits.clear();
  s.trace.clear();
  s.tracing = true;
  s.update();
}

Trace::~Trace() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.tracing = false;
  s.update();
}

std::vector<std::string> Trace::visits() const {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  return s.trace;
}

}  // namespace longhaul::fault
