// The AdamW optimizer over named parameters (the update itself: ops/adam_w). A parameter without a
// gradient is left alone: no update, no decay, no moments, no step. Called by the trainer.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "longhaul/nn/module.h"

namespace longhaul::optim {

struct AdamWConfig {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
  // Glob patterns (* and ?) of whole parameter names that are not decayed.
  std::vector<std::string> no_decay;
};

class AdamW {
 public:
  // State of one parameter; moments in the parameter's dtype and on its device.
  struct State {
    at::Tensor exp_avg, exp_avg_sq;
    int64_t step = 0;
  };

  // UserError, with names that there are, if a pattern of no_decay matches no parameter.
  AdamW(std::vector<nn::NamedParameter> parameters, const AdamWConfig& config);

  // One update; gradients are multiplied by `grad_scale` on the way (the clipping factor).
  void step(double lr, double grad_scale);

  // By parameter name; only parameters that were updated at least once.
  const std::map<std::string, State>& state() const { return state_; }
  // Replaces the whole state. Throws UserError on a name or shape that no parameter has.
  void set_state(std::map<std::string, State> state);

 private:
  bool decays(const std::string& name) const;
  State& state_of(const nn::NamedParameter& parameter);

  std::vector<nn::NamedParameter> parameters_;
  AdamWConfig config_;
  std::map<std::string, State> state_;
};

}  // namespace longhaul::optim
