// The option table: many ranks.
#include "longhaul/config/option_builder.h"

namespace longhaul {
namespace {

template <typename Section>
void add_pipeline(Section& section) {
  using S = Parallelism;
  section.key("pipeline_parallel_degree", &S::pipeline_parallel_degree,
              "Ranks that hold the layers one after another.", at_least(1));
  section.key("module_fqns_per_model_part", &S::module_fqns_per_model_part,
              "Names of the modules of each stage, instead of an even cut.");
  section.key("pipeline_parallel_first_stage_less_layers",
              &S::pipeline_parallel_first_stage_less_layers,
              "Layers that the first stage has less, for the embedding.", at_least(0));
  section.key("pipeline_parallel_last_stage_less_layers",
              &S::pipeline_parallel_last_stage_less_layers,
              "Layers that the last stage has less, for the output head.", at_least(0));
  section.key("pipeline_parallel_layers_per_stage", &S::pipeline_parallel_layers_per_stage,
              "Layers of a stage; default: follows from the schedule.", at_least(1));
  section.key("pipeline_parallel_schedule", &S::pipeline_parallel_schedule,
              "Order of forward and backward passes.");
  section.key("pipeline_parallel_schedule_csv", &S::pipeline_parallel_schedule_csv,
              "File with a schedule of one's own.");
  section.key("pipeline_parallel_microbatch_size", &S::pipeline_parallel_microbatch_size,
              "Samples of a microbatch.", at_least(1));
  section.key("pipeline_parallel_expert_parallel_overlap",
              &S::pipeline_parallel_expert_parallel_overlap,
              "DualPipeV: overlap expert exchange with computation.");
}

template <typename Section>
void add_context_and_expert(Section& section) {
  using S = Parallelism;
  section.key("context_parallel_degree", &S::context_parallel_degree,
              "Ranks that share a sequence.", at_least(1));
  section.key("context_parallel_rotate_method", &S::context_parallel_rotate_method,
              "How keys and values are exchanged.", one_of({"allgather", "alltoall"}));
  section.key("expert_parallel_degree", &S::expert_parallel_degree,
              "Ranks that share the routed experts.", at_least(1));
  section.key("expert_tensor_parallel_degree", &S::expert_tensor_parallel_degree,
              "Ranks that share one expert's matrices; 1 or tensor_parallel_degree.", at_least(1));
  section.key("expert_parallel_comm_backend", &S::expert_parallel_comm_backend,
              "How tokens travel to experts.", one_of({"standard", "deepep"}));
  section.recipe("enable_custom_context_parallel", &S::enable_custom_context_parallel,
                 "Context parallelism of the model's own attention, as DSA needs it.");
  section.recipe("custom_context_parallel_path", &S::custom_context_parallel_path,
                 "Its name: dsa, or the recipe's class; empty: dsa.");
  section.own("context_parallel_load_balancer", &S::context_parallel_load_balancer,
              "headtail: a rank takes a chunk from the head of the sequence and one from its tail, "
              "so that all have as much to attend to; none: consecutive slots.",
              one_of({"headtail", "none"}));
}

void add_parallelism(std::vector<Option>& table) {
  OptionSection section(
      table, "parallelism", [](auto& c) -> auto& { return c.parallelism; });
  using S = Parallelism;
  section.key("data_parallel_replicate_degree", &S::data_parallel_replicate_degree,
              "Copies of the (sharded) weights.", at_least(1));
  section.key("data_parallel_shard_degree", &S::data_parallel_shard_degree,
              "Ranks that share the weights (FSDP); -1: all that are left.",
              minus_one_or_at_least(1));
  section.key("fsdp_reshard_after_forward", &S::fsdp_reshard_after_forward,
              "Free gathered weights after the forward pass: default: those of the blocks; "
              "always: also those of the last norm and the output head (and of the embedding, "
              "where MTP uses it again), which are then gathered at every use; never: none.",
              one_of({"default", "always", "never"}));
  section.key("tensor_parallel_degree", &S::tensor_parallel_degree,
              "Ranks that share each layer's matrices.", at_least(1));
  section.key("disable_loss_parallel", &S::disable_loss_parallel,
              "Gather the logits instead of computing the loss on shards.");
  section.key("enable_async_tensor_parallel", &S::enable_async_tensor_parallel,
              "Overlap tensor-parallel exchange with the products.");
  add_pipeline(section);
  add_context_and_expert(section);
}

void add_comm(std::vector<Option>& table) {
  OptionSection comm(
      table, "comm", [](auto& c) -> auto& { return c.comm; });
  using S = Comm;
  comm.key("init_timeout_seconds", &S::init_timeout_seconds,
           "Timeout of collectives up to the first step.", at_least(1));
  comm.key("train_timeout_seconds", &S::train_timeout_seconds,
           "Timeout of collectives after the first step.", at_least(1));
  comm.key("trace_buf_size", &S::trace_buf_size,
           "Collectives that the flight recorder remembers; 0: off.", at_least(0));
  comm.key("save_traces_folder", &S::save_traces_folder,
           "Folder of the recorder's files, under dump_folder.");
  comm.key("save_traces_file_prefix", &S::save_traces_file_prefix, "Start of those files' names.");
  comm.key("mode", &S::mode, "Real communication, or a stand-in for tests.",
           one_of({"default", "fake_backend", "local_tensor"}));
}

void add_rest(std::vector<Option>& table) {
  OptionSection memory(
      table, "memory_estimation", [](auto& c) -> auto& { return c.memory_estimation; });
  memory.key("enable", &MemoryEstimation::enable, "Estimate memory instead of training.");
  memory.key("disable_fake_mode", &MemoryEstimation::disable_fake_mode,
             "Estimate with real tensors.");
  OptionSection ft(
      table, "fault_tolerance", [](auto& c) -> auto& { return c.fault_tolerance; });
  using S = FaultTolerance;
  ft.key("enable", &S::enable, "Replicas that may fail and come back.");
  ft.key("process_group", &S::process_group, "Backend between replicas.");
  ft.key("process_group_timeout_ms", &S::process_group_timeout_ms, "Timeout between replicas.",
         at_least(1));
  ft.key("replica_id", &S::replica_id, "Number of this replica.", at_least(0));
  ft.key("group_size", &S::group_size, "Number of replicas.", at_least(0));
  ft.key("min_replica_size", &S::min_replica_size, "Replicas that a step needs.", at_least(1));
  ft.key("semi_sync_method", &S::semi_sync_method, "local_sgd or diloco.");
  OptionSection experimental(
      table, "experimental", [](auto& c) -> auto& { return c.experimental; });
  experimental.key("custom_import", &Experimental::custom_import, "A Python module to import.");
  experimental.key("custom_args_module", &Experimental::custom_args_module,
                   "Old name of job.custom_config_module.");
}

}  // namespace

void add_parallel_options(std::vector<Option>& table) {
  add_parallelism(table);
  add_comm(table);
  add_rest(table);
}

}  // namespace longhaul
