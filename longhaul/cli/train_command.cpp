// `longhaul train`: runs a job until it is done or asked to stop.
#include <CLI/CLI.hpp>
#include <atomic>
#include <csignal>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/cli/commands.h"
#include "longhaul/cli/job.h"
#include "longhaul/cli/launcher.h"
#include "longhaul/cli/rank_environment.h"
#include "longhaul/config/degrees.h"
#include "longhaul/config/write.h"
#include "longhaul/train/device.h"
#include "longhaul/train/preflight.h"
#include "longhaul/train/run.h"

namespace longhaul::cli {
namespace {

// A signal handler reaches nothing but statics.
std::atomic<bool> stop_requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);

void request_stop(int) { stop_requested = true; }

// The first signal lets the step finish and saves; a second one of the same kind ends the process.
void catch_signals() {
  struct sigaction action {};
  action.sa_handler = request_stop;
  action.sa_flags = SA_RESETHAND | SA_RESTART;
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
       .timeout = std::chrono::seconds(config.comm.init_timeout_seconds)});
}

// The command line that each rank gets: this one, without the number of ranks.
std::vector<std::string> words_of_rank(const CLI::App& command) {
  std::vector<std::string> words = {command.get_name()};
  for (const auto& word : command.remaining()) words.push_back(word);
  return words;
}

void train(const CLI::App& command, int64_t ranks) {
  const JobConfig config = load_job_of(command).config;
  constexpr int64_t kMostRanks = 1024;
  if (ranks < 1 || ranks > kMostRanks) {
    fail_user("--ranks {}: expected 1 to {} processes on this machine", ranks, kMostRanks);
  }
  if (ranks != 1) {
    if (rank_environment(process_variables())) {
      fail_user("--ranks {}: another launcher has started the ranks already; leave it out", ranks);
    }
    train::check_job(config, ranks);  // once, and not by each of them
    launch_ranks(narrow<int>(ranks), words_of_rank(command));
    return;
  }
  if (config.metrics.disable_color_printing) log::configure(false);
  dtensor::World world = world_of(config);
  if (config.job.print_config && world.rank() == 0) log::info("\n{}", to_toml(config));
  catch_signals();  // until here they end the process
  train::run_training(config, stop_requested, world);
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
