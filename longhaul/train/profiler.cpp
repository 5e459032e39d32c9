#include "longhaul/train/profiler.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <set>

#include "longhaul/base/clock.h"
#include "longhaul/base/error.h"
#include "longhaul/base/file.h"
#include "longhaul/train/losses.h"
#include "longhaul/train/memory_snapshot.h"
#include "longhaul/train/trainer.h"

namespace longhaul::train {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using Clock = std::chrono::steady_clock;

std::set<ActivityType> activities(at::DeviceType device) {
  std::set<ActivityType> kinds = {ActivityType::CPU};
  if (device == at::kCUDA) kinds.insert(ActivityType::CUDA);
  return kinds;
}

torch::profiler::impl::ProfilerConfig profiler_config(bool memory) {
  return torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::KINETO,
                                               /*report_input_shapes=*/false,
                                               /*profile_memory=*/memory);
}

void start_recording(at::DeviceType device, bool memory) {
  // Without a GPU Kineto would say so as an error.
  constexpr int kKeepTheUsers = 0;
  if (device == at::kCPU) setenv("KINETO_LOG_LEVEL", "99", kKeepTheUsers);
  kineto::prepareProfiler(profiler_config(memory), activities(device));
  kineto::enableProfiler(profiler_config(memory), activities(device));
}

// The nodes of the graph and the engine around them are one row.
std::string row_of(const kineto::KinetoEvent& event) {
  const bool node = event.scope() == static_cast<uint8_t>(at::RecordScope::BACKWARD_FUNCTION);
  return node || event.name().starts_with("autograd::engine") ? "autograd" : event.name();
}

// Named ranges, which are no operators; a device's trace repeats them by name.
std::set<std::string> range_names(const std::vector<kineto::KinetoEvent>& events) {
  std::set<std::string> names = {"[memory]"};
  for (const auto& event : events) {
    if (event.scope() == static_cast<uint8_t>(at::RecordScope::USER_SCOPE))
      names.insert(event.name());
  }
  return names;
}

// On the CPU an operator's own time is what the operators inside it leave of it; events of one
// thread nest. A device's kernels do not nest.
std::vector<OperatorTime> own_times(const std::vector<kineto::KinetoEvent>& events,
                                    at::DeviceType device) {
  const auto ranges = range_names(events);
  std::vector<const kineto::KinetoEvent*> sorted;
  for (const auto& event : events) {
    const bool counts = event.deviceType() == device && !event.isAsync();
    if (counts && ranges.count(event.name()) == 0) sorted.push_back(&event);
  }
  std::sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) {
    return std::tuple(a->startThreadId(), a->startNs(), -static_cast<int64_t>(a->endNs())) <
           std::tuple(b->startThreadId(), b->startNs(), -static_cast<int64_t>(b->endNs()));
  });
  std::map<std::string, OperatorTime> by_name;
  std::vector<std::pair<const kineto::KinetoEvent*, OperatorTime*>> open;
  for (const auto* event : sorted) {
    while (!open.empty() && (open.back().first->startThreadId() != event->startThreadId() ||
                             open.back().first->endNs() <= event->startNs())) {
      open.pop_back();
    }
    const double seconds = 1e-9 * static_cast<double>(event->durationNs());
    auto& own = by_name[row_of(*event)];
    own.calls += 1;
    own.seconds += seconds;
    if (!open.empty() && device == at::kCPU) open.back().second->seconds -= seconds;
    open.emplace_back(event, &own);
  }
  std::vector<OperatorTime> times;
  for (auto& [name, own] : by_name) {
    own.name = name;
    times.push_back(own);
  }
  std::sort(times.begin(), times.end(),
            [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
  return times;
}

// A row is one document, of token 0.
deepseek_v3::Batch batch_of_one_document(int64_t rows, int64_t seq_len, int64_t mtp_modules) {
  const at::Tensor ids = at::zeros({rows, seq_len + mtp_modules}, at::kLong);
  const at::Tensor positions = at::arange(ids.size(1), at::kLong).expand_as(ids).contiguous();
  return deepseek_v3::prepare_batch(ids, ids, positions, seq_len);
}

void create_writable(const std::filesystem::path& folder) {
  create_folders(folder);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) fail_file("write into", folder, errno);
}

}  // namespace

std::string to_table(const StepProfile& profile, double host_seconds) {
  constexpr size_t kRows = 16;
  const auto steps = static_cast<double>(std::max<int64_t>(profile.steps, 1));
  const double step = profile.seconds / steps;
  std::string text =
      fmt::format("  {:<44}{:>8}{:>12}{:>9}\n", "operator", "calls", "ms a step", "share");
  const auto row = [&](const std::string& name, const std::string& calls, double seconds) {
    text += fmt::format("  {:<44}{:>8}{:>12.1f}{:>8.1f}%\n", name, calls, 1e3 * seconds,
                        100 * seconds / step);
  };
  double rest = 0, inside = 0;
  for (size_t i = 0; i < profile.operators.size(); ++i) {
    const auto& one = profile.operators[i];
    inside += one.seconds / steps;
    if (i >= kRows) {
      rest += one.seconds / steps;
    } else {
      row(one.name, fmt::format("{:.0f}", static_cast<double>(one.calls) / steps),
          one.seconds / steps);
    }
  }
  if (profile.operators.size() > kRows) {
    row(fmt::format("{} others", profile.operators.size() - kRows), "", rest);
  }
  row("outside of operators", "", std::max(step - inside, 0.0));
  row("a whole step", "", step);
  row("host, forward and backward (on shapes alone)", "", host_seconds);
  return text;
}

double measure_host_seconds(const JobConfig& config, const ResolvedModel& resolved, int64_t rows) {
  const auto batch =
      batch_of_one_document(rows, config.training.seq_len, resolved.shape.num_nextn_predict_layers);
  deepseek_v3::Model model(resolved.shape, model_settings(config, at::kMeta));
  apply_converters(config, model);
  deepseek_v3::ForwardContext ctx;
  ctx.counts.add(batch);
  const auto shapes = batch.to(at::kMeta);
  double seconds = 0;
  for (int i = 0; i < 2; ++i) {  // the first is a warm-up
    const auto start = Clock::now();
    const auto hidden = model.forward(shapes, ctx);
    const auto objective =
        compute_objective(model, shapes, hidden, ctx.counts, config.mtp.loss_weight);
    if (objective.total.requires_grad()) torch::autograd::backward({objective.total}, {});
    seconds = seconds_since(start);
  }
  return seconds;
}

bool records_steps(const JobConfig& config) {
  return config.profiling.enable_profiling || config.profiling.enable_memory_snapshot;
}

Profiler::Profiler(const JobConfig& config) : config_(config) {
  const auto& options = config.profiling;
  const std::pair<bool, const std::string&> folders[] = {
      {options.enable_profiling, options.save_traces_folder},
      {options.enable_memory_snapshot, options.save_memory_snapshot_folder}};
  for (const auto& [wanted, name] : folders) {
    if (wanted) create_writable(std::filesystem::path(config.job.dump_folder) / name);
  }
}

Profiler::~Profiler() {
  if (state_ != State::kOff) kineto::disableProfiler();
}

Profiler::State Profiler::state_of(int64_t step) const {
  const auto& options = config_.profiling;
  const int64_t left = options.profile_freq - 1 - (step - 1) % options.profile_freq;
  if (left < options.profiler_active) return State::kRecording;
  return left < options.profiler_active + options.profiler_warmup ? State::kWarmup : State::kOff;
}

void Profiler::begin_step(int64_t step, at::Device device) {
  const State wanted = state_of(step);
  if (wanted != state_) {
    if (state_ != State::kOff) kineto::disableProfiler();
    state_ = wanted;
    device_ = device.type();
    steps_ = 0;
    if (wanted != State::kOff) start_recording(device_, config_.profiling.enable_memory_snapshot);
    began_ = Clock::now();
  }
}

std::optional<StepProfile> Profiler::end_step(int64_t step) {
  const double seconds = seconds_since(began_);
  steps_ += 1;
  if (state_ != State::kRecording || step % config_.profiling.profile_freq != 0) {
    return std::nullopt;
  }
  const auto result = kineto::disableProfiler();
  state_ = State::kOff;
  StepProfile profile{.operators = own_times(result->events(), device_),
                      .seconds = seconds,
                      .steps = steps_,
                      .files = {}};
  const auto& options = config_.profiling;
  if (options.enable_profiling) {
    profile.files.push_back(path_of(options.save_traces_folder, step, "rank0_trace.json"));
    result->save(profile.files.back().string());
  }
  if (options.enable_memory_snapshot) {
    profile.files.push_back(
        path_of(options.save_memory_snapshot_folder, step, "rank0_memory_snapshot.json"));
    write_memory_snapshot(profile.files.back(), memory_snapshot(result->event_tree(), device_));
  }
  return profile;
}

std::filesystem::path Profiler::path_of(const std::string& folder, int64_t step,
                                        const char* name) const {
  const auto of_step =
      std::filesystem::path(config_.job.dump_folder) / folder / fmt::format("iteration_{}", step);
  create_folders(of_step);
  return of_step / name;
}

}  // namespace longhaul::train
