#include "longhaul/base/fault.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "longhaul/base/file.h"
#include "longhaul/base/log.h"
#include "longhaul/base/text.h"

namespace longhaul::fault {
namespace {

enum class Kind {
  kKill,
  kHang,
  kDelay,
  kWait,
  kThrow,
  kNoSpace,
  kNoCall,
  kShortWrite,
  kFlippedBit
};

struct Plan {
  std::string place;
  int nth = 1;
  Kind kind = Kind::kKill;
  int delay_ms = 1000;
  bool on_this_rank = true;
};

constexpr std::pair<std::string_view, Kind> kKinds[] = {
    {"kill", Kind::kKill},        {"hang", Kind::kHang},       {"delay", Kind::kDelay},
    {"throw", Kind::kThrow},      {"enospc", Kind::kNoSpace},  {"einval", Kind::kNoCall},
    {"short", Kind::kShortWrite}, {"flip", Kind::kFlippedBit}, {"wait", Kind::kWait}};

Kind parse_kind(std::string_view text, std::string_view specification) {
  for (const auto& [name, kind] : kKinds) {
    if (text == name) return kind;
  }
  fail_user(
      "LONGHAUL_FAULT '{}': '{}' is neither a number nor kill, hang, delay, delay-<ms>, wait, "
      "throw, enospc, einval, short, flip or rank-<number>",
      specification, text);
}

std::optional<int> parse_number(std::string_view text) {
  int number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
}

// Of "<prefix><number>".
std::optional<int> number_after(std::string_view prefix, std::string_view text) {
  return text.starts_with(prefix) ? parse_number(text.substr(prefix.size())) : std::nullopt;
}

bool is_known(std::string_view place) {
  return place.starts_with("test.") ||
         std::find(std::begin(kPlaces), std::end(kPlaces), place) != std::end(kPlaces);
}

// A process that is no rank counts as rank 0.
int own_rank() {
  const char* rank = std::getenv("RANK");
  return rank == nullptr ? 0 : parse_number(rank).value_or(0);
}

Plan parse_plan(std::string_view specification) {
  Plan plan;
  size_t colon = specification.find(':');
  plan.place = specification.substr(0, colon);
  if (plan.place.empty()) fail_user("LONGHAUL_FAULT '{}': it names no place", specification);
  if (!is_known(plan.place)) {
    fail_user("LONGHAUL_FAULT '{}': there is no place '{}'{}", specification, plan.place,
              did_you_mean(plan.place, {std::begin(kPlaces), std::end(kPlaces)}));
  }
  while (colon != std::string_view::npos) {
    const size_t begin = colon + 1;
    colon = specification.find(':', begin);
    const std::string_view part =
        specification.substr(begin, colon == std::string_view::npos ? colon : colon - begin);
    if (const auto number = parse_number(part); number && *number > 0) {
      plan.nth = *number;
    } else if (const auto rank = number_after("rank-", part)) {
      plan.on_this_rank = *rank == own_rank();
    } else if (const auto delay_ms = number_after("delay-", part)) {
      plan.kind = Kind::kDelay;
      plan.delay_ms = *delay_ms;
    } else {
      plan.kind = parse_kind(part, specification);
    }
  }
  return plan;
}

std::vector<Plan> parse_plans(std::string_view specification) {
  std::vector<Plan> plans;
  while (true) {
    const size_t comma = specification.find(',');
    plans.push_back(parse_plan(specification.substr(0, comma)));
    if (comma == std::string_view::npos) return plans;
    specification.remove_prefix(comma + 1);
  }
}

// The one piece of process-wide state: places are visited from anywhere, and the environment is
// process-wide as well.
struct State {
  State() {
    const char* specification = std::getenv("LONGHAUL_FAULT");
    if (specification != nullptr && *specification != '\0') plans = parse_plans(specification);
    update();
  }
  void update() { active = !plans.empty() || tracing; }

  std::atomic<bool> active{false};
  std::mutex mutex;
  std::vector<Plan> plans;
  std::condition_variable disarmed;
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

void wait_until_disarmed() {
  State& s = state();
  std::unique_lock lock(s.mutex);
  s.disarmed.wait(lock, [&] { return s.plans.empty(); });
}

Order fire(const Plan& plan, int nth) {
  switch (plan.kind) {
    case Kind::kKill:
      log::error("fault injection: visit {} of '{}' kills this process", nth, plan.place);
      ::kill(::getpid(), SIGKILL);
      hang();
    case Kind::kHang:
      log::error("fault injection: visit {} of '{}' hangs", nth, plan.place);
      hang();
    case Kind::kDelay:
      std::this_thread::sleep_for(std::chrono::milliseconds(plan.delay_ms));
      break;
    case Kind::kWait:
      wait_until_disarmed();
      break;
    case Kind::kThrow:
      throw Injected(fmt::format("fault injection: visit {} of '{}'", nth, plan.place));
    case Kind::kNoSpace:
      return {.code = ENOSPC};
    case Kind::kNoCall:
      return {.code = EINVAL};
    case Kind::kShortWrite:
      return {.short_write = true};
    case Kind::kFlippedBit:
      return {.flipped_bit = true};
  }
  return {};
}

}  // namespace

namespace detail {

Order visit(std::string_view place) {
  State& s = state();
  if (!s.active.load(std::memory_order_relaxed)) [[likely]] {
    return {};
  }
  LONGHAUL_CHECK(is_known(place), "'{}' is not in fault::kPlaces", place);
  std::unique_lock lock(s.mutex);
  auto found = s.visits.find(place);
  if (found == s.visits.end()) found = s.visits.emplace(place, 0).first;
  const int nth = ++found->second;
  if (s.tracing) s.trace.push_back(fmt::format("{}:{}", place, nth));
  const auto is_here = [&](const Plan& plan) {
    return plan.on_this_rank && plan.place == place && plan.nth == nth;
  };
  const auto planned = std::find_if(s.plans.begin(), s.plans.end(), is_here);
  if (planned == s.plans.end()) return {};
  const Plan plan = *planned;
  lock.unlock();  // a thread that hangs must not hold up the others
  return fire(plan, nth);
}

void throw_errno(std::string_view place, int code) {
  throw FileError(code, fmt::format("{} (fault injection at '{}')",
                                    std::generic_category().message(code), place));
}

}  // namespace detail

void announce() {
  const char* specification = std::getenv("LONGHAUL_FAULT");
  if (specification == nullptr || *specification == '\0') return;
  if (!kCompiledIn) {
    log::warn("LONGHAUL_FAULT is set, and does nothing: built with LONGHAUL_FAULTS=OFF");
    return;
  }
  state();
  if (own_rank() == 0) log::warn("LONGHAUL_FAULT is set: this program fails at {}", specification);
}

Armed::Armed(std::string_view specification) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.plans = parse_plans(specification);
  s.visits.clear();
  s.update();
}

Armed::~Armed() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.plans.clear();
  s.update();
  s.disarmed.notify_all();
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
