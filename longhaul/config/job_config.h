// The job: every key of a job file, one struct a section, with its default. Plain values, no
// behaviour; what a key means, its range and its help text stand in option_table.cpp, which pairs
// every member below with its name. Read by everything from the trainer up; written by load.h only.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "longhaul/base/error.h"

namespace longhaul {

using Strings = std::vector<std::string>;
using Integers = std::vector<int64_t>;
using StringLists = std::vector<Strings>;

// One corpus of a mixture.
struct MixPart {
  std::string path;     // as training.dataset_path
  double weight = 1.0;  // its share of the rows, beside the others' weights
  bool operator==(const MixPart&) const = default;
};
using Mix = std::vector<MixPart>;

// Where a value came from: the default, a line of the job file or the command line.
struct Origin {
  enum class Kind { kDefault, kFile, kCommandLine };
  Kind kind = Kind::kDefault;
  std::string file;
  int64_t line = 0;

  std::string text() const;  // "default" | "job.toml:12" | "command line"
  bool operator==(const Origin&) const = default;
};

struct JobSection {
  std::optional<std::string> config_file;
  std::string dump_folder = "./outputs";
  std::string description = "default job";
  bool print_config = false;
  std::optional<std::string> save_config_file;
  std::string custom_config_module;
};

struct Profiling {
  bool enable_profiling = false;
  std::string save_traces_folder = "profile_traces";
  int64_t profile_freq = 10;
  int64_t profiler_active = 1;
  int64_t profiler_warmup = 3;
  bool enable_memory_snapshot = false;
  std::string save_memory_snapshot_folder = "memory_snapshot";
};

struct Metrics {
  int64_t log_freq = 10;
  bool enable_tensorboard = false;
  bool disable_color_printing = false;
  std::string save_tb_folder = "tb";
  bool save_for_all_ranks = false;
  bool enable_wandb = false;
  int64_t indexer_recall_freq = 0;
};

struct Model {
  std::string name = "llama3";
  std::string flavor = "debugmodel";
  std::string hf_assets_path = "./tests/assets/tokenizer";
  std::optional<std::string> tokenizer_path;  // replaces hf_assets_path when given
  Strings converters;
  bool print_after_conversion = false;
  std::optional<double> init_std;
  bool init_depth_scale = false;
  std::string mla_form = "absorbed";
};

struct Optimizer {
  std::string name = "AdamW";
  double lr = 8e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  std::string implementation = "fused";
  bool early_step_in_backward = false;
  bool swap_optimizer = false;
  int64_t swap_optimizer_times = 16;
  Strings no_decay;
};

struct LrScheduler {
  int64_t warmup_steps = 200;
  std::optional<double> decay_ratio;
  std::string decay_type = "linear";
  double min_lr_factor = 0.0;
};

struct DataLoader {
  int64_t num_workers = 0;
  bool persistent_workers = false;
  bool pin_memory = false;
  std::optional<int64_t> prefetch_factor;
};

struct Training {
  std::string dataset = "c4_test";
  std::optional<std::string> dataset_path;
  int64_t local_batch_size = 8;
  int64_t global_batch_size = -1;
  int64_t seq_len = 2048;
  double max_norm = 1.0;
  double norm_type = 2.0;
  int64_t steps = 10000;
  bool enable_cpu_offload = false;
  std::string dtype = "float32";
  std::string mixed_precision_param = "bfloat16";
  std::string mixed_precision_reduce = "float32";
  int64_t gc_freq = 50;
  bool gc_debug = false;
  std::string device = "auto";
  bool document_mask = true;
  double max_minutes = 0.0;
  std::string nonfinite = "stop";
  std::string invalid_text = "stop";
  bool repeat = true;
  std::string text_field = "text";
  std::string packing = "concatenate";
  std::string bad_documents = "error";
  int64_t stream_above_mb = 1024;
  Mix mix;
  DataLoader dataloader;
};

struct Parallelism {
  int64_t data_parallel_replicate_degree = 1;
  int64_t data_parallel_shard_degree = -1;
  std::string fsdp_reshard_after_forward = "default";
  int64_t tensor_parallel_degree = 1;
  bool disable_loss_parallel = false;
  bool enable_async_tensor_parallel = false;
  int64_t pipeline_parallel_degree = 1;
  std::optional<StringLists> module_fqns_per_model_part;
  int64_t pipeline_parallel_first_stage_less_layers = 1;
  int64_t pipeline_parallel_last_stage_less_layers = 1;
  std::optional<int64_t> pipeline_parallel_layers_per_stage;
  std::string pipeline_parallel_schedule = "1F1B";
  std::string pipeline_parallel_schedule_csv;  // empty: none
  int64_t pipeline_parallel_microbatch_size = 1;
  bool pipeline_parallel_expert_parallel_overlap = true;
  int64_t context_parallel_degree = 1;
  std::string context_parallel_rotate_method = "allgather";
  int64_t expert_parallel_degree = 1;
  int64_t expert_tensor_parallel_degree = 1;
  std::string expert_parallel_comm_backend = "standard";
  bool enable_custom_context_parallel = false;
  std::string custom_context_parallel_path;
  std::string context_parallel_load_balancer = "headtail";
};

struct Checkpoint {
  bool enable = false;
  bool enable_ft_dataloader_checkpoints = true;
  std::string folder = "checkpoint";
  int64_t interval = 500;
  std::optional<std::string> initial_load_path;
  bool initial_load_model_only = true;
  bool initial_load_in_hf = false;
  bool initial_load_in_hf_quantized = false;
  bool last_save_model_only = true;
  bool last_save_in_hf = false;
  std::string export_dtype = "float32";
  std::string async_mode = "disabled";
  int64_t keep_latest_k = 10;
  int64_t load_step = -1;
  Strings exclude_from_loading;
  bool enable_first_step_checkpoint = false;
  bool create_seed_checkpoint = false;
  bool load_only = false;
  bool verify_on_load = true;
};

struct ActivationCheckpoint {
  std::string mode = "selective";
  std::string selective_ac_option = "2";
  Strings per_op_sac_force_recompute_mm_shapes_by_fqns = {"moe.router.gate"};
  Strings op_sac_save_list = {"linear", "flash_attention", "sparse_flash_attention", "all_to_all",
                              "reduce_scatter"};
  bool early_stop = false;
  double memory_budget = 0.5;
  bool visualize_memory_budget_pareto = false;
  bool preserve_rng_state = false;
  std::string determinism_check = "default";
  bool debug = false;
};

struct Compile {
  bool enable = false;
  Strings components = {"model", "loss"};
  std::string backend = "inductor";
};

struct QuantizeLinearFloat8 {
  bool enable_fsdp_float8_all_gather = false;
  bool precompute_float8_dynamic_scale_for_fsdp = false;
  std::optional<std::string> recipe_name;
  Strings filter_fqns;
  bool emulate = false;
};

struct QuantizeLinearMx {
  std::string mxfp8_dim1_cast_kernel_choice = "triton";
  std::string recipe_name = "mxfp8_cublas";
  Strings filter_fqns = {"output"};
};

struct QuantizeGroupedMmFloat8 {
  Strings fqns;
};

struct QuantizeGroupedMmMx {
  std::string recipe_name = "mxfp8";
  Strings fqns;
};

struct QuantizeLinear {
  QuantizeLinearFloat8 float8;
  QuantizeLinearMx mx;
};

struct QuantizeGroupedMm {
  QuantizeGroupedMmFloat8 float8;
  QuantizeGroupedMmMx mx;
};

struct Quantize {
  QuantizeLinear linear;
  QuantizeGroupedMm grouped_mm;
};

struct Comm {
  int64_t init_timeout_seconds = 300;
  int64_t train_timeout_seconds = 100;
  int64_t trace_buf_size = 20000;
  std::string save_traces_folder = "comm_traces";
  std::string save_traces_file_prefix = "rank_";
  std::string mode = "default";
};

struct MemoryEstimation {
  bool enable = false;
  bool disable_fake_mode = false;
};

struct FaultTolerance {
  bool enable = false;
  std::string process_group = "gloo";
  int64_t process_group_timeout_ms = 10000;
  int64_t replica_id = 0;
  int64_t group_size = 0;
  int64_t min_replica_size = 1;
  std::optional<std::string> semi_sync_method;
};

struct Experimental {
  std::string custom_import;
  std::string custom_args_module;
};

struct Validation {
  bool enable = false;
  std::string dataset = "c4_validation";
  std::optional<std::string> dataset_path;
  int64_t local_batch_size = 8;
  int64_t seq_len = 2048;
  int64_t freq = 10;
  int64_t steps = -1;
  double split = 0.0;
  DataLoader dataloader;
};

struct Debug {
  std::optional<int64_t> seed;
  bool deterministic = false;
  bool deterministic_warn_only = false;
  bool moe_force_load_balance = false;
  Integers dump_steps;
};

// DeepSeek Sparse Attention.
struct Dsa {
  std::string stage = "sparse";
  double indexer_loss_coeff = 1.0;
  bool train_indexer = true;
  bool hadamard = false;
  std::string indexer_rope = "half_split";
};

struct Moe {
  double bias_update_speed = 1e-3;
  bool bias_update_zero_mean = true;
  double sequence_balance_loss_coeff = 0.0;
  double z_loss_coeff = 0.0;
};

// Multi-token prediction.
struct Mtp {
  std::optional<int64_t> num_modules;
  double loss_weight = 0.3;
  std::string hidden = "before_norm";
  bool own_norm = false;
};

struct JobConfig {
  JobSection job;
  Profiling profiling;
  Metrics metrics;
  Model model;
  Optimizer optimizer;
  LrScheduler lr_scheduler;
  Training training;
  Parallelism parallelism;
  Checkpoint checkpoint;
  ActivationCheckpoint activation_checkpoint;
  Compile compile;
  Quantize quantize;
  Comm comm;
  MemoryEstimation memory_estimation;
  FaultTolerance fault_tolerance;
  Experimental experimental;
  Validation validation;
  Debug debug;
  Dsa dsa;
  Moe moe;
  Mtp mtp;

  // By key ("training.steps"); a key that is not in here has its default.
  std::map<std::string, Origin> origins;

  Origin origin_of(const std::string& key) const;
};

// Throws UserError "<place of the key>: <key>: <why>".
[[noreturn]] void fail_setting(const JobConfig& config, const std::string& key,
                               const std::string& why);

// What f returns; a UserError of its gets the setting's place and name in front.
template <typename F>
auto name_setting(const JobConfig& config, const std::string& key, const F& f) {
  try {
    return f();
  } catch (const UserError& error) {
    fail_setting(config, key, error.what());
  }
}

}  // namespace longhaul
