#include "longhaul/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace longhaul::optim {
namespace {

// How much of the way from min_lr_factor to 1 is left after `progress` (0 to 1) of the decay.
double remaining(DecayType type, double progress) {
  switch (type) {
    case DecayType::kLinear:
      return 1 - progress;
    case DecayType::kSqrt:
      return 1 - std::sqrt(progress);
    case DecayType::kCosine:
      return 0.5 * (1 + std::cos(std::numbers::pi * progress));
  }
  return 0;
}

}  // namespace

LrSchedule::LrSchedule(const LrScheduleOptions& options)
    : options_(options), warmup_steps_(std::min(options.warmup_steps, options.steps)) {
  const int64_t after_warmup = options.steps - warmup_steps_;
  decay_steps_ = after_warmup;
  if (options.decay_ratio) {
    // Python's round: halves go to the even number.
    const double wanted = std::nearbyint(static_cast<double>(options.steps) * *options.decay_ratio);
    decay_steps_ = std::min(static_cast<int64_t>(wanted), after_warmup);
  }
  stable_steps_ = options.steps + 1 - warmup_steps_ - decay_steps_;
}

double LrSchedule::lr(int64_t step) const { return options_.lr * factor(step); }

double LrSchedule::factor(int64_t step) const {
  if (step <= warmup_steps_) return static_cast<double>(step) / static_cast<double>(warmup_steps_);
  const int64_t into_decay = step - warmup_steps_ - stable_steps_;
  if (into_decay <= 0 || decay_steps_ == 0) return 1.0;
  const double progress =
      std::min(1.0, static_cast<double>(into_decay) / static_cast<double>(decay_steps_));
  return options_.min_lr_factor +
         (1 - options_.min_lr_factor) * remaining(options_.decay_type, progress);
}

}  // namespace longhaul::optim
