// The option table: what a run writes and reports.
#include "longhaul/config/option_builder.h"

namespace longhaul {
namespace {

void add_job(std::vector<Option>& table) {
  OptionSection job(
      table, "job", [](auto& c) -> auto& { return c.job; });
  using S = JobSection;
  job.key("config_file", &S::config_file, "The job file; on the command line only.");
  job.key("dump_folder", &S::dump_folder, "The folder that everything the run writes goes under.");
  job.key("description", &S::description, "A line for people, repeated in the log.");
  job.key("print_config", &S::print_config, "Print the resolved job at start-up.");
  job.key("save_config_file", &S::save_config_file,
          "Write the resolved job as TOML to this file under dump_folder.");
  job.key("custom_config_module", &S::custom_config_module,
          "A Python module with more keys; not read here, the recipe's keys are built in.");
}

void add_profiling(std::vector<Option>& table) {
  OptionSection profiling(
      table, "profiling", [](auto& c) -> auto& { return c.profiling; });
  using S = Profiling;
  profiling.key("enable_profiling", &S::enable_profiling,
                "Record Chrome traces, and print where the time of a step went.");
  profiling.key("save_traces_folder", &S::save_traces_folder,
                "Folder of the traces, under dump_folder; rank 0 alone leaves some.");
  profiling.key("profile_freq", &S::profile_freq, "Steps from one trace to the next.", at_least(1));
  profiling.key("profiler_active", &S::profiler_active, "Steps in a trace.", at_least(1));
  profiling.key("profiler_warmup", &S::profiler_warmup, "Steps observed but not kept before one.",
                at_least(0));
  profiling.key("enable_memory_snapshot", &S::enable_memory_snapshot,
                "Record which operators hold the memory of a step, over its time and at its peak.");
  profiling.key("save_memory_snapshot_folder", &S::save_memory_snapshot_folder,
                "Folder of the snapshots, under dump_folder; rank 0 alone leaves some.");
}

void add_metrics(std::vector<Option>& table) {
  OptionSection metrics(
      table, "metrics", [](auto& c) -> auto& { return c.metrics; });
  using S = Metrics;
  metrics.key(
      "log_freq", &S::log_freq,
      "Steps from one log line to the next. The load of the experts, memory by kind and the "
      "times of a step's parts are measured as often.",
      at_least(1));
  metrics.key("enable_tensorboard", &S::enable_tensorboard,
              "Write TensorBoard events every log_freq steps.");
  metrics.key("disable_color_printing", &S::disable_color_printing, "No colours in the log.");
  metrics.key("save_tb_folder", &S::save_tb_folder, "Folder of the events, under dump_folder.");
  metrics.key("save_for_all_ranks", &S::save_for_all_ranks,
              "Events from every rank, not only from one.");
  metrics.key("enable_wandb", &S::enable_wandb,
              "Write wandb-history.jsonl, which Weights & Biases can import; nothing is sent.");
  metrics.own("indexer_recall_freq", &S::indexer_recall_freq,
              "Steps from one measurement of the indexer's recall to the next, which costs a dense "
              "forward attention; 0: never.",
              at_least(0));
}

void add_checkpoint(std::vector<Option>& table) {
  OptionSection checkpoint(
      table, "checkpoint", [](auto& c) -> auto& { return c.checkpoint; });
  using S = Checkpoint;
  checkpoint.key("enable", &S::enable, "Save and load checkpoints.");
  checkpoint.key("enable_ft_dataloader_checkpoints", &S::enable_ft_dataloader_checkpoints,
                 "With fault_tolerance: each replica saves its data position.");
  checkpoint.key("folder", &S::folder, "Folder of the checkpoints, under dump_folder.");
  checkpoint.key("interval", &S::interval, "Steps from one checkpoint to the next.", at_least(1));
  checkpoint.key("initial_load_path", &S::initial_load_path,
                 "Start from this checkpoint when the run's own folder has none.");
  checkpoint.key("initial_load_model_only", &S::initial_load_model_only,
                 "Take only the weights from initial_load_path.");
  checkpoint.key("initial_load_in_hf", &S::initial_load_in_hf,
                 "initial_load_path is a Hugging Face folder of safetensors.");
  checkpoint.key(
      "initial_load_in_hf_quantized", &S::initial_load_in_hf_quantized,
      "The Hugging Face weights that a run starts from may be quantized (FP8 blocks with "
      "scales).");
  checkpoint.key("last_save_model_only", &S::last_save_model_only,
                 "The checkpoint of the last step holds only the weights.");
  checkpoint.key("last_save_in_hf", &S::last_save_in_hf,
                 "Also write the weights of the last step as a Hugging Face folder, step-N-hf.");
  checkpoint.key("export_dtype", &S::export_dtype,
                 "Type of the weights in a last checkpoint that holds only the weights; float32 "
                 "leaves them as they are. float8_e4m3fn, which TorchTitan has not, is for the "
                 "Hugging Face folder of last_save_in_hf alone: FP8 in blocks with scales.",
                 one_of({"float16", "bfloat16", "float32", "float8_e4m3fn"}));
  checkpoint.key("async_mode", &S::async_mode, "Save while training goes on.",
                 one_of({"disabled", "async", "async_with_pinned_mem"}));
  checkpoint.key("keep_latest_k", &S::keep_latest_k, "Checkpoints to keep; 0 keeps all.",
                 at_least(0));
  checkpoint.key("load_step", &S::load_step,
                 "Step to resume from, at each start: later ones are set aside; -1 is the latest.",
                 minus_one_or_at_least(0));
  checkpoint.key("exclude_from_loading", &S::exclude_from_loading,
                 "Parts that are not restored, e.g. optimizer, lr_scheduler, dataloader.");
  checkpoint.key("enable_first_step_checkpoint", &S::enable_first_step_checkpoint,
                 "Also save after the first step, to try the storage out.");
  checkpoint.key("create_seed_checkpoint", &S::create_seed_checkpoint,
                 "Not needed here: initial weights do not depend on the layout.");
  checkpoint.key("load_only", &S::load_only, "Load, but never save.");
  checkpoint.own("verify_on_load", &S::verify_on_load,
                 "Compare every byte with its checksum before a checkpoint is taken.");
}

void add_debug(std::vector<Option>& table) {
  OptionSection debug(
      table, "debug", [](auto& c) -> auto& { return c.debug; });
  using S = Debug;
  debug.key("seed", &S::seed, "Seed of initial weights and data order.", at_least(0));
  debug.key("deterministic", &S::deterministic, "Only deterministic kernels.");
  debug.key("deterministic_warn_only", &S::deterministic_warn_only,
            "Warn of a kernel that is not deterministic instead of failing.");
  debug.key("moe_force_load_balance", &S::moe_force_load_balance,
            "Deal tokens to experts in turn; for measurements only.");
  debug.own("dump_steps", &S::dump_steps,
            "Steps whose gradients, parameters and losses are written to files.", at_least(1));
}

}  // namespace

void add_run_options(std::vector<Option>& table) {
  add_job(table);
  add_profiling(table);
  add_metrics(table);
  add_checkpoint(table);
  add_debug(table);
}

}  // namespace longhaul
