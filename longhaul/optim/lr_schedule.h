// Learning rate by step: TorchTitan's warmup-stable-decay schedule. Linear warm-up from lr /
// warmup_steps, a stable part, then decay over the last `decay_ratio` of the steps (without it,
// over everything after the warm-up) to min_lr_factor * lr. A virtual step after the last one takes
// the end of the decay, so the last real step still learns. Pure arithmetic; called by the trainer.
#pragma once

#include <cstdint>
#include <optional>

namespace longhaul::optim {

enum class DecayType { kLinear, kSqrt, kCosine };

struct LrScheduleOptions {
  double lr = 8e-4;
  int64_t steps = 0;  // of the whole training
  int64_t warmup_steps = 0;
  std::optional<double> decay_ratio;
  DecayType decay_type = DecayType::kLinear;
  double min_lr_factor = 0.0;
};

class LrSchedule {
 public:
  // A warm-up or decay longer than the training is cut to fit, as TorchTitan does.
  explicit LrSchedule(const LrScheduleOptions& options);

  // `step` counts from 1.
  double lr(int64_t step) const;

 private:
  double factor(int64_t step) const;

  LrScheduleOptions options_;
  int64_t warmup_steps_, decay_steps_, stable_steps_;
};

}  // namespace longhaul::optim
