#include "longhaul/optim/adam_w.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fnmatch.h>

#include <algorithm>

#include "longhaul/base/error.h"
#include "longhaul/base/text.h"
#include "longhaul/ops/adam_w/adam_w.h"

namespace longhaul::optim {
namespace {

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

bool matches_any(const std::string& pattern, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const auto& name) { return matches(pattern, name); });
}

[[noreturn]] void fail_unmatched(const std::string& pattern,
                                 const std::vector<std::string>& names) {
  if (names.empty()) fail_user("'{}' matches no parameter: there are none", pattern);
  // Most often a part of a name is given where the whole name must match.
  const std::string part = "*" + pattern + "*";
  const std::string hint = matches_any(part, names) ? fmt::format(", did you mean '{}'?", part)
                                                    : did_you_mean(pattern, names);
  fail_user("'{}' matches the whole name of no parameter{}; there are names such as {}, {} and {}",
            pattern, hint, names.front(), names[names.size() / 2], names.back());
}

}  // namespace

AdamW::AdamW(std::vector<nn::NamedParameter> parameters, const AdamWConfig& config)
    : parameters_(std::move(parameters)), config_(config) {
  std::vector<std::string> names;
  for (const auto& parameter : parameters_) names.push_back(parameter.name);
  for (const auto& pattern : config_.no_decay) {
    if (!matches_any(pattern, names)) fail_unmatched(pattern, names);
  }
}

bool AdamW::decays(const std::string& name) const {
  return std::none_of(config_.no_decay.begin(), config_.no_decay.end(),
                      [&](const auto& pattern) { return matches(pattern, name); });
}

AdamW::State& AdamW::state_of(const nn::NamedParameter& parameter) {
  State& state = state_[parameter.name];
  if (!state.exp_avg.defined()) {
    state.exp_avg = at::zeros_like(*parameter.tensor, at::MemoryFormat::Contiguous).detach();
    state.exp_avg_sq = at::zeros_like(*parameter.tensor, at::MemoryFormat::Contiguous).detach();
  }
  return state;
}

void AdamW::step(double lr, double grad_scale) {
  const at::NoGradGuard no_grad;
  std::vector<ops::AdamWUpdate> updates;
  for (auto& parameter : parameters_) {
    const at::Tensor& grad = parameter.tensor->grad();
    if (!grad.defined()) continue;
    State& state = state_of(parameter);
    updates.push_back({.param = *parameter.tensor,
                       .grad = grad,
                       .exp_avg = state.exp_avg,
                       .exp_avg_sq = state.exp_avg_sq,
                       .step = ++state.step,
                       .decays = decays(parameter.name)});
  }
  ops::adam_w(updates, {.lr = lr,
                        .beta1 = config_.beta1,
                        .beta2 = config_.beta2,
                        .eps = config_.eps,
                        .weight_decay = config_.weight_decay,
                        .grad_scale = grad_scale});
}

void AdamW::set_state(std::map<std::string, State> state) {
  for (const auto& [name, entry] : state) {
    const auto found = std::find_if(parameters_.begin(), parameters_.end(),
                                    [&](const auto& p) { return p.name == name; });
    if (found == parameters_.end() || entry.exp_avg.sizes() != found->tensor->sizes() ||
        entry.exp_avg_sq.sizes() != found->tensor->sizes()) {
      fail_user("optimizer state of '{}' fits no parameter of the model", name);
    }
  }
  state_ = std::move(state);
}

}  // namespace longhaul::optim
