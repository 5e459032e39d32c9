// The option table: data, steps, optimizer, memory.
#include "longhaul/config/names.h"
#include "longhaul/config/option_builder.h"

namespace longhaul {
namespace {

template <typename Section>
void add_dataloader(Section section) {
  using S = DataLoader;
  section.key("num_workers", &S::num_workers,
              "Threads that read and tokenise; 0: two. Batches do not depend on it.", at_least(0));
  section.key("persistent_workers", &S::persistent_workers,
              "Not used: the data are read by threads, which stay from pass to pass.");
  section.key("pin_memory", &S::pin_memory, "Not used: batches lie in ordinary memory.");
  section.key("prefetch_factor", &S::prefetch_factor,
              "Not used: a stream is read two chunks ahead.", at_least(1));
}

void add_training(std::vector<Option>& table) {
  OptionSection training(
      table, "training", [](auto& c) -> auto& { return c.training; });
  using S = Training;
  training.key(
      "dataset", &S::dataset,
      "files (alias text): a corpus of text files, JSONL, Parquet or prepared tokens, told apart "
      "by content; tokenized: JSONL rows of input_ids, labels, position_ids. TorchTitan's names "
      "mean files where dataset_path says where they are; nothing is downloaded.",
      one_of(dataset_names()));
  training.key("dataset_path", &S::dataset_path,
               "A folder, a file, a glob, or a comma separated list of these.");
  training.own("mix", &S::mix,
               "Several corpora instead of dataset_path, as [[training.mix]] tables: path, and "
               "weight (default 1), the share of the rows.");
  training.own("text_field", &S::text_field,
               "The field of JSONL rows and the column of Parquet files that holds the text.");
  training.own("packing", &S::packing,
               "concatenate: documents one behind the other, cut every seq_len tokens; best_fit: "
               "whole documents, placed where they fill a row best, and only longer ones cut.",
               one_of({"concatenate", "best_fit"}));
  training.own("bad_documents", &S::bad_documents,
               "On a document that cannot be read (broken UTF-8, no text, a truncated file; of the "
               "validation data too): error, or skip it with a warning.",
               one_of({"error", "skip"}));
  training.own("stream_above_mb", &S::stream_above_mb,
               "Corpora above this size in MB of text are read as a stream, in bounded memory; "
               "others are held in memory.",
               at_least(0));
  training.key("local_batch_size", &S::local_batch_size, "Samples a rank takes at once.",
               at_least(1));
  training.key("global_batch_size", &S::global_batch_size,
               "Samples in a step; -1: local_batch_size times the data-parallel degree, larger "
               "values accumulate gradients.",
               minus_one_or_at_least(1));
  training.key("seq_len", &S::seq_len, "Tokens in a sample.", at_least(1));
  training.key("max_norm", &S::max_norm, "Gradients are clipped to this norm; inf: never.",
               above_or_inf(0));
  training.own("norm_type", &S::norm_type, "p of the p-norm that is clipped; inf: the largest.",
               above_or_inf(0));
  training.key("steps", &S::steps, "Optimizer steps to train for.", at_least(1));
  training.key("enable_cpu_offload", &S::enable_cpu_offload,
               "FSDP keeps parameters, gradients and optimizer states on the host.");
  training.key("dtype", &S::dtype,
               "Type of weights and optimizer states. float64 (ours) also computes in float64, "
               "whatever mixed_precision_param says.",
               one_of({"bfloat16", "float32", "float64"}));
  training.key("mixed_precision_param", &S::mixed_precision_param,
               "Type in which forward and backward compute.", one_of({"bfloat16", "float32"}));
  training.key("mixed_precision_reduce", &S::mixed_precision_reduce,
               "Type in which gradients are reduced.", one_of({"float32"}));
  training.key("gc_freq", &S::gc_freq, "Python's garbage collection; nothing to do here.",
               at_least(0));
  training.key("gc_debug", &S::gc_debug, "Python's garbage collection; nothing to do here.");
  training.own("device", &S::device, "Where to train; auto: CUDA where there is a GPU.",
               one_of({"auto", "cpu", "cuda"}));
  training.own("document_mask", &S::document_mask,
               "Tokens attend only within their own document of a packed sample.");
  training.own("max_minutes", &S::max_minutes,
               "Stop with a checkpoint after this time; 0: no limit.", at_least(0));
  training.own("nonfinite", &S::nonfinite,
               "On a loss or gradient that is not finite: stop, or skip the step.",
               one_of({"stop", "skip"}));
  training.own(
      "invalid_text", &S::invalid_text,
      "On a NUL byte or broken UTF-8 in a text file (of the validation data too): stop, or "
      "replace it by U+FFFD.",
      one_of({"stop", "replace"}));
  training.own("repeat", &S::repeat,
               "Read the data again and again; false: the run ends where it ends on any rank.");
  add_dataloader(OptionSection(
      table, "training.dataloader", [](auto& c) -> auto& { return c.training.dataloader; }));
}

void add_validation(std::vector<Option>& table) {
  OptionSection validation(
      table, "validation", [](auto& c) -> auto& { return c.validation; });
  using S = Validation;
  validation.key("enable", &S::enable, "Measure the loss on held-out data while training.");
  validation.key("dataset", &S::dataset, "As training.dataset.", one_of(dataset_names()));
  validation.key("dataset_path", &S::dataset_path, "As training.dataset_path. Not with split.");
  validation.key("local_batch_size", &S::local_batch_size, "Samples a rank takes at once.",
                 at_least(1));
  validation.key("seq_len", &S::seq_len, "Tokens in a sample.", at_least(1));
  validation.key("freq", &S::freq, "Steps from one validation to the next.", at_least(1));
  validation.key("steps", &S::steps, "Batches of each data rank in a validation; -1: all the data.",
                 minus_one_or_at_least(1));
  validation.own("split", &S::split,
                 "The share of the training corpus's documents, chosen by a hash of their text, "
                 "that is held out for validation and never trained on; 0: none.",
                 fraction_below_one());
  add_dataloader(OptionSection(
      table, "validation.dataloader", [](auto& c) -> auto& { return c.validation.dataloader; }));
}

void add_optimizer(std::vector<Option>& table) {
  OptionSection optimizer(
      table, "optimizer", [](auto& c) -> auto& { return c.optimizer; });
  using S = Optimizer;
  optimizer.key("name", &S::name, "The optimizer.", one_of({"AdamW", "Adam"}));
  optimizer.key("lr", &S::lr, "Learning rate after warm-up.", at_least(0));
  optimizer.key("beta1", &S::beta1, "Decay of the first moment.", fraction_below_one());
  optimizer.key("beta2", &S::beta2, "Decay of the second moment.", fraction_below_one());
  optimizer.key("eps", &S::eps, "Added to the root of the second moment.", at_least(0));
  optimizer.key("weight_decay", &S::weight_decay, "Decoupled weight decay.", at_least(0));
  optimizer.key("implementation", &S::implementation,
                "PyTorch's choice of kernel; one kernel serves all three here.",
                one_of({"for-loop", "foreach", "fused"}));
  optimizer.key("early_step_in_backward", &S::early_step_in_backward,
                "Update each parameter inside the backward pass.");
  optimizer.recipe("swap_optimizer", &S::swap_optimizer,
                   "Keep optimizer states on the host between steps.");
  optimizer.recipe("swap_optimizer_times", &S::swap_optimizer_times,
                   "Slices in which the states are brought back.", at_least(1));
  optimizer.own("no_decay", &S::no_decay,
                "Parameters without weight decay, by name pattern, e.g. *norm.weight.");
}

void add_lr_scheduler(std::vector<Option>& table) {
  OptionSection lr(
      table, "lr_scheduler", [](auto& c) -> auto& { return c.lr_scheduler; });
  using S = LrScheduler;
  lr.key("warmup_steps", &S::warmup_steps, "Steps of linear warm-up.", at_least(0));
  lr.key("decay_ratio", &S::decay_ratio,
         "Part of the steps that decay; not given: all after the warm-up.", between(0, 1));
  lr.key("decay_type", &S::decay_type, "Form of the decay.", one_of({"linear", "sqrt", "cosine"}));
  lr.key("min_lr_factor", &S::min_lr_factor, "Final learning rate as a part of optimizer.lr.",
         between(0, 1));
}

void add_activation_checkpoint(std::vector<Option>& table) {
  OptionSection ac(
      table, "activation_checkpoint", [](auto& c) -> auto& { return c.activation_checkpoint; });
  using S = ActivationCheckpoint;
  ac.key("mode", &S::mode, "What is recomputed in the backward pass.",
         one_of({"selective", "full", "memory_budget", "none"}));
  ac.key("selective_ac_option", &S::selective_ac_option,
         "selective: a number n for every n-th block, or op: every block but for the results of "
         "op_sac_save_list.");
  ac.key("per_op_sac_force_recompute_mm_shapes_by_fqns",
         &S::per_op_sac_force_recompute_mm_shapes_by_fqns,
         "op: products linear with weights of these modules' sizes are always recomputed.");
  ac.own("op_sac_save_list", &S::op_sac_save_list,
         "op: operators whose results are kept; of linear every second one.",
         one_of(savable_operator_names()));
  ac.key("early_stop", &S::early_stop, "Stop recomputing once everything needed is there.");
  ac.key("memory_budget", &S::memory_budget, "memory_budget: part of the memory to keep.",
         between(0, 1));
  ac.key("visualize_memory_budget_pareto", &S::visualize_memory_budget_pareto,
         "memory_budget: draw the trade-off.");
  ac.key("preserve_rng_state", &S::preserve_rng_state, "Restore random states for recomputation.");
  ac.key("determinism_check", &S::determinism_check, "How recomputed tensors are compared.");
  ac.key("debug", &S::debug, "Record what is recomputed.");
}

void add_compile(std::vector<Option>& table) {
  OptionSection compile(
      table, "compile", [](auto& c) -> auto& { return c.compile; });
  using S = Compile;
  compile.key("enable", &S::enable, "Compile parts of the step.");
  compile.key("components", &S::components, "The parts.", one_of({"model", "loss"}));
  compile.key("backend", &S::backend, "The compiler.");
}

}  // namespace

void add_training_options(std::vector<Option>& table) {
  add_training(table);
  add_validation(table);
  add_optimizer(table);
  add_lr_scheduler(table);
  add_activation_checkpoint(table);
  add_compile(table);
}

}  // namespace longhaul
