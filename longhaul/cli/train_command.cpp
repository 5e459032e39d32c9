// `longhaul train`: runs a job until it is done or asked to stop.
#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/cli/commands.h"
#include "longhaul/cli/crash_handler.h"
#include "longhaul/cli/failure.h"
#include "longhaul/cli/job.h"
#include "longhaul/cli/launcher.h"
#include "longhaul/cli/rank_environment.h"
#include "longhaul/cli/trace_signal.h"
#include "longhaul/config/degrees.h"
#include "longhaul/config/write.h"
#include "longhaul/train/device.h"
#include "longhaul/train/preflight.h"
#include "longhaul/train/run.h"
#include "longhaul/train/run_folder.h"

namespace longhaul::cli {
namespace {

// A signal handler reaches nothing but statics.
std::atomic<bool> stop_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void request_stop(int signal) {
  stop_requested = true;
  end_sanely_on(signal);
}

// The first signal lets the step finish and saves; a second one of the same kind ends the process.
void catch_signals() {
  struct sigaction action {};
  action.sa_handler = request_stop;
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaction(signal, &action, nullptr);
}

// This process's end of the job's ranks.
dtensor::World world_of(const JobConfig& config) {
  const auto found = rank_environment(process_variables());
  if (!found) return dtensor::World::single();
  check_degrees(config, found->size);
  return dtensor::World::process(
      {.rank = found->rank,
       .size = found->size,
       .host = found->host,
       .port = found->port,
       .listen_socket = found->rank == 0 ? found->listen_socket : std::nullopt,
       .device = train::choose_device_of_rank(config, found->local_rank),
       .timeout = std::chrono::seconds(config.comm.init_timeout_seconds),
       .job = settings_of_all_ranks(config)});
}

fs::path traces_folder(const JobConfig& config) {
  return fs::path(config.job.dump_folder) / config.comm.save_traces_folder;
}

// What every rank would find out alike is told once.
void check_ranks(const JobConfig& config, int64_t ranks) {
  train::check_job(config, ranks);
  const Degrees degrees = resolve_degrees(config, ranks);
  train::check_machine(config, resolve_model(config), degrees.shard * degrees.cp * degrees.tp,
                       ranks);
  train::claim_run_folder(config);  // and leaves it to the first rank
}

void start_ranks(const CLI::App& command, int64_t ranks) {
  constexpr int64_t kMostRanks = 1024;
  if (ranks < 1 || ranks > kMostRanks) {
    fail_user("--ranks {}: expected 1 to {} processes on this machine", ranks, kMostRanks);
  }
  if (rank_environment(process_variables())) {
    fail_user("--ranks {}: another launcher has started the ranks already; leave it out", ranks);
  }
  block_trace_signal();  // launch_ranks() passes it on
  const InheritedJob job = load_inherited_job_of(command);
  check_ranks(job.config, ranks);
  launch_ranks({.ranks = narrow<int>(ranks),
                .words = job.words,
                .traces = job.config.comm.trace_buf_size > 0 ? traces_folder(job.config) : ""});
}

// What failed, with the place of this rank's trace.
std::string with_trace(dtensor::FlightRecorder& recorder, const std::string& what) {
  const auto path = recorder.dump_failure(what);
  return path ? fmt::format("{}; its last collectives are in {}", what, path->string()) : what;
}

// A rank that fails, or waits for one in vain, leaves a trace; users' mistakes need none.
void train_and_trace(const JobConfig& config, dtensor::World& world) {
  dtensor::FlightRecorder recorder(world,
                                   {.folder = traces_folder(config),
                                    .prefix = config.comm.save_traces_file_prefix,
                                    .records = static_cast<size_t>(config.comm.trace_buf_size)});
  const TraceOnSignal trace_on_signal(recorder);
  try {
    train::run_training(config, stop_requested, world);
  } catch (const UserError&) {
    throw;
  } catch (const dtensor::CollectiveError& error) {
    throw dtensor::CollectiveError(with_trace(recorder, one_line(error)));
  } catch (const std::exception& error) {
    throw Error(with_trace(recorder, one_line(error)));
  }
}

void train(const CLI::App& command, int64_t ranks) {
  if (ranks != 1) return start_ranks(command, ranks);
  const JobConfig config = load_job_of(command).config;
  block_trace_signal();  // before there are threads
  if (config.metrics.disable_color_printing) {
    log::configure(false);
    setenv("NO_COLOR", "1", /*replace=*/1);  // for the live line
  }
  dtensor::World world = world_of(config);
  if (config.job.print_config && world.rank() == 0) log::info("\n{}", to_toml(config));
  catch_signals();  // until here they end the process
  train_and_trace(config, world);
}

}  // namespace

void add_train_command(CLI::App& app) {
  auto* command = app.add_subcommand(
      "train",
      "Train the model of a job; the same command goes on where a run stopped\n  longhaul train "
      "job.toml [--section.key value ...]\n  `longhaul config keys` lists the keys");
  command->allow_extras();
  // Printed before the example, and made only when asked for.
  command->footer([] { return "Keys, each given as --section.key value:\n\n" + keys_text(""); });
  command->footer(
      "Example:\n  longhaul train configs/quickstart.toml --training.steps 100 --optimizer.lr "
      "1e-4");
  auto ranks = std::make_shared<int64_t>(1);
  command->add_option("--ranks", *ranks,
                      "Start that many processes on this machine; torchrun, srun and mpirun are "
                      "understood, too");
  command->callback([command, ranks] { train(*command, *ranks); });
}

}  // namespace longhaul::cli
