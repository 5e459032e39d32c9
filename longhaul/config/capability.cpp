#include "longhaul/config/capability.h"

#include <algorithm>
#include <array>
#include <functional>

#include "longhaul/base/error.h"
#include "longhaul/config/names.h"
#include "longhaul/config/option.h"

namespace longhaul {
namespace {

// `applies`: the setting asks for the behaviour and nothing else makes it inert.
struct Rule {
  const char* key;
  std::function<bool(const JobConfig&)> applies;
  const char* text;
};

// By operator, with attention among those whose results are kept.
bool saves_attention(const ActivationCheckpoint& ac) {
  return ac.mode == "selective" && ac.selective_ac_option == "op" &&
         std::any_of(ac.op_sac_save_list.begin(), ac.op_sac_save_list.end(),
                     [](auto& name) { return name.ends_with("flash_attention"); });
}

bool converts_attention(const Strings& converters) {
  return std::any_of(converters.begin(), converters.end(),
                     [](auto& name) { return name == "dsa" || name == "npu_dsa"; });
}

// Of a single rank; on more the degrees must multiply to their number.
std::vector<Rule> one_rank_rules() {
  const char* one_process = "there is one rank; start more (--ranks) or set it to 1";
  return {
      {"parallelism.data_parallel_replicate_degree",
       [](auto& c) { return c.parallelism.data_parallel_replicate_degree > 1; }, one_process},
      {"parallelism.data_parallel_shard_degree",
       [](auto& c) { return c.parallelism.data_parallel_shard_degree > 1; },
       "there is one rank; start more (--ranks) or set it to 1 or -1"},
      {"parallelism.context_parallel_degree",
       [](auto& c) { return c.parallelism.context_parallel_degree > 1; }, one_process},
      {"parallelism.expert_parallel_degree",
       [](auto& c) { return c.parallelism.expert_parallel_degree > 1; }, one_process},
      {"parallelism.tensor_parallel_degree",
       [](auto& c) { return c.parallelism.tensor_parallel_degree > 1; }, one_process},
  };
}

std::vector<Rule> parallel_rules() {
  return {
      {"parallelism.pipeline_parallel_degree",
       [](auto& c) { return c.parallelism.pipeline_parallel_degree > 1; },
       "the layers cannot be dealt to stages yet; set it to 1"},
      {"parallelism.expert_parallel_comm_backend",
       [](auto& c) {
         return c.parallelism.expert_parallel_degree > 1 &&
                c.parallelism.expert_parallel_comm_backend == "deepep";
       },
       "tokens travel by all-to-all only in this version; set it to \"standard\""},
      {"parallelism.disable_loss_parallel",
       [](auto& c) {
         return c.parallelism.tensor_parallel_degree > 1 && c.parallelism.disable_loss_parallel;
       },
       "with tensor parallelism the loss is computed on shards of the vocabulary; set it to false"},
      {"parallelism.enable_async_tensor_parallel",
       [](auto& c) {
         return c.parallelism.tensor_parallel_degree > 1 &&
                c.parallelism.enable_async_tensor_parallel;
       },
       "tensor-parallel exchange is not overlapped with the products yet; set it to false"},
      {"comm.mode", [](auto& c) { return c.comm.mode != "default"; },
       "there is no training with a stand-in for communication yet; set it to \"default\""},
      {"fault_tolerance.enable", [](auto& c) { return c.fault_tolerance.enable; },
       "replicas that may fail are not supported yet; set it to false"},
  };
}

std::vector<Rule> training_rules() {
  const char* dataset = "is not built in; give dataset_path, where its files are on this machine";
  return {
      {"training.dataset",
       [](auto& c) { return c.training.mix.empty() && !is_available_dataset(c.training.dataset); },
       dataset},
      {"validation.dataset",
       [](auto& c) { return c.validation.enable && !is_available_dataset(c.validation.dataset); },
       dataset},
      {"training.enable_cpu_offload", [](auto& c) { return c.training.enable_cpu_offload; },
       "weights stay on the device in this version; set it to false"},
      {"optimizer.name", [](auto& c) { return c.optimizer.name != "AdamW"; },
       "only AdamW is there yet; for Adam without decay use AdamW with weight_decay = 0"},
      {"optimizer.early_step_in_backward",
       [](auto& c) { return c.optimizer.early_step_in_backward; },
       "parameters are updated after the backward pass in this version; set it to false"},
      {"optimizer.swap_optimizer", [](auto& c) { return c.optimizer.swap_optimizer; },
       "optimizer states stay on the device in this version; set it to false"},
      {"activation_checkpoint.debug",
       [](auto& c) {
         return c.activation_checkpoint.mode != "none" && c.activation_checkpoint.debug;
       },
       "what is recomputed is not recorded in this version; set it to false"},
      {"activation_checkpoint.mode",
       [](auto& c) { return c.activation_checkpoint.mode == "memory_budget"; },
       "there is no budget planner yet; set it to \"selective\", \"full\" or \"none\""},
      {"compile.enable", [](auto& c) { return c.compile.enable; },
       "there is no graph compiler yet; set it to false"},
  };
}

std::vector<Rule> report_rules() {
  return {
      {"model.converters",
       [](auto& c) {
         return std::any_of(c.model.converters.begin(), c.model.converters.end(),
                            [](auto& name) { return name.starts_with("quantize."); });
       },
       "quantize.* is not there in this version; leave it out"},
      {"memory_estimation.enable", [](auto& c) { return c.memory_estimation.enable; },
       "there is no memory planner yet; set it to false"},
      {"experimental.custom_import", [](auto& c) { return !c.experimental.custom_import.empty(); },
       "Python modules are not imported; remove it"},
  };
}

std::vector<Rule> note_rules() {
  return {
      {"activation_checkpoint.op_sac_save_list",
       [](auto& c) {
         return saves_attention(c.activation_checkpoint) && !converts_attention(c.model.converters);
       },
       "attention is kept with the converter \"dsa\" only; the reference is computed again"},
      {"checkpoint.create_seed_checkpoint",
       [](auto& c) { return c.checkpoint.enable && c.checkpoint.create_seed_checkpoint; },
       "not needed and not made: initial weights do not depend on the layout"},
      {"model.tokenizer_path", [](auto& c) { return c.model.tokenizer_path.has_value(); },
       "old name: taken as model.hf_assets_path"},
      {"training.mixed_precision_param",
       [](auto& c) {
         return c.training.dtype == "float64" &&
                c.origin_of("training.mixed_precision_param").kind != Origin::Kind::kDefault;
       },
       "not used: training.dtype = \"float64\" computes in float64"},
  };
}

// What a file says about workers that are processes elsewhere.
std::vector<Rule> dataloader_rules() {
  const auto loaders = [](const JobConfig& c) {
    return std::array{&c.training.dataloader, &c.validation.dataloader};
  };
  const char* const keys[][2] = {
      {"training.dataloader.persistent_workers", "validation.dataloader.persistent_workers"},
      {"training.dataloader.pin_memory", "validation.dataloader.pin_memory"},
      {"training.dataloader.prefetch_factor", "validation.dataloader.prefetch_factor"}};
  std::vector<Rule> rules;
  for (const size_t i : {size_t{0}, size_t{1}}) {
    rules.push_back({keys[0][i], [=](auto& c) { return loaders(c)[i]->persistent_workers; },
                     "not used: the data are read by threads, which stay from pass to pass"});
    rules.push_back({keys[1][i], [=](auto& c) { return loaders(c)[i]->pin_memory; },
                     "not used: batches lie in ordinary memory"});
    rules.push_back({keys[2][i],
                     [=](auto& c) { return loaders(c)[i]->prefetch_factor.has_value(); },
                     "not used: a stream is read two chunks ahead"});
  }
  return rules;
}

// What a file says about an indexer that the architecture does not have.
std::vector<Rule> indexer_rules() {
  std::vector<Rule> rules;
  for (const char* key : {"dsa.stage", "dsa.indexer_loss_coeff", "dsa.train_indexer",
                          "dsa.hadamard", "dsa.indexer_rope"}) {
    const auto applies = [key](const JobConfig& c) {
      return c.model.name == "deepseek_v3" && c.dsa.stage != "off" &&
             c.origin_of(key).kind != Origin::Kind::kDefault;
    };
    rules.push_back({key, applies, "not used: deepseek_v3 has no indexer"});
  }
  return rules;
}

void append_matching(const std::vector<Rule>& rules, const JobConfig& config,
                     std::vector<Remark>& out) {
  for (const auto& rule : rules) {
    if (!rule.applies(config)) continue;
    const Option* option = find_option(rule.key);
    LONGHAUL_CHECK(option, "no option {}", rule.key);
    out.push_back(
        {rule.key, toml_text(option->get(config)), config.origin_of(rule.key), rule.text});
  }
}

}  // namespace

std::string Remark::line() const {
  return fmt::format("{}: {} = {}: {}", origin.text(), key, value, text);
}

std::vector<Remark> missing_behaviour(const JobConfig& config, int64_t ranks) {
  std::vector<Remark> found;
  append_matching(training_rules(), config, found);
  if (ranks == 1) append_matching(one_rank_rules(), config, found);
  for (const auto& rules : {parallel_rules(), report_rules()}) {
    append_matching(rules, config, found);
  }
  return found;
}

std::vector<Remark> notes(const JobConfig& config) {
  std::vector<Remark> found;
  for (const auto& rules : {note_rules(), dataloader_rules(), indexer_rules()}) {
    append_matching(rules, config, found);
  }
  return found;
}

void refuse_missing_behaviour(const JobConfig& config, int64_t ranks) {
  const auto missing = missing_behaviour(config, ranks);
  if (missing.empty()) return;
  const std::string more =
      missing.size() == 1
          ? ""
          : fmt::format(" ({} more: `longhaul config check` lists them)", missing.size() - 1);
  fail_user("{}{}", missing[0].line(), more);
}

}  // namespace longhaul
