#include "longhaul/train/step_timer.h"

#include <algorithm>
#include <exception>

#include "longhaul/train/device.h"

namespace longhaul::train {

using Clock = std::chrono::steady_clock;

StepTimer::Part::Part(StepTimer& timer, const char* name)
    : timer_(timer), name_(name), range_("{}", name), start_(Clock::now()) {}

StepTimer::Part::~Part() {
  if (!timer_.measure_) return;
  try {
    synchronize(timer_.device_);
  } catch (const std::exception&) {
    return;  // a device that fails says so again, where it may be thrown
  }
  timer_.seconds_[name_] += std::chrono::duration<double>(Clock::now() - start_).count();
}

std::map<std::string, double> StepTimer::seconds(double whole) const {
  if (!measure_) return {};
  auto by_part = seconds_;
  for (const auto& [name, seconds] : seconds_) whole -= seconds;
  by_part["other"] = std::max(whole, 0.0);
  return by_part;
}

}  // namespace longhaul::train
