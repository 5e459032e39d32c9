#include "longhaul/config/validate.h"

#include <algorithm>
#include <charconv>
#include <tuple>

#include "longhaul/base/error.h"
#include "longhaul/base/text.h"
#include "longhaul/config/names.h"

namespace longhaul {
namespace {

// One message form for all: the place and key of the setting to change, then why.
void check_converters(const JobConfig& config) {
  const auto known = converter_names();
  for (const auto& name : config.model.converters) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    fail_setting(config, "model.converters",
                 fmt::format("unknown converter '{}'{}", name,
                             nearest_name(name, known).empty()
                                 ? fmt::format("; known are {}", fmt::join(known, ", "))
                                 : did_you_mean(name, known)));
  }
}

// The default dataset needs no path of its own, so only a dataset that was asked for is checked.
void check_dataset(const JobConfig& config, const char* key, const std::string& name,
                   const std::optional<std::string>& path) {
  if (is_available_dataset(name) && (!path || path->empty())) {
    fail_setting(config, key,
                 fmt::format("\"{}\" needs {}_path, the files or folder to read", name, key));
  }
}

void check_mix(const JobConfig& config) {
  const auto& training = config.training;
  if (training.mix.empty()) return;
  if (training.dataset_path) {
    fail_setting(config, "training.dataset_path",
                 "training.mix names the corpora; remove one of the two");
  }
  if (training.dataset == "tokenized") {
    fail_setting(
        config, "training.mix",
        "mixes corpora of text, and training.dataset is \"tokenized\"; set it to \"files\"");
  }
}

void check_packing(const JobConfig& config) {
  if (config.training.packing != "best_fit" || config.training.document_mask) return;
  fail_setting(config, "training.packing",
               "\"best_fit\" packs whole documents that do not see one another; set "
               "training.document_mask = true");
}

void check_split(const JobConfig& config) {
  if (config.validation.split == 0) return;
  if (config.validation.dataset_path) {
    fail_setting(config, "validation.split",
                 "takes documents of the training corpus, and validation.dataset_path names "
                 "another one; remove one of the two");
  }
  if (config.training.dataset == "tokenized") {
    fail_setting(config, "validation.split",
                 "takes whole documents, which \"tokenized\" rows do not tell; set it to 0");
  }
}

void check_batch(const JobConfig& config) {
  const auto& training = config.training;
  if (training.global_batch_size > 0 &&
      training.global_batch_size % training.local_batch_size != 0) {
    fail_setting(config, "training.global_batch_size",
                 fmt::format("{} is not a multiple of training.local_batch_size {}",
                             training.global_batch_size, training.local_batch_size));
  }
}

void check_checkpoint(const JobConfig& config) {
  const auto& checkpoint = config.checkpoint;
  if (!checkpoint.enable) return;
  if (checkpoint.initial_load_in_hf && !checkpoint.initial_load_model_only) {
    fail_setting(config, "checkpoint.initial_load_model_only",
                 "must be true with initial_load_in_hf: a Hugging Face folder holds only weights");
  }
  if (checkpoint.initial_load_in_hf_quantized && !checkpoint.initial_load_in_hf) {
    fail_setting(config, "checkpoint.initial_load_in_hf_quantized",
                 "needs checkpoint.initial_load_in_hf = true");
  }
  if (checkpoint.last_save_in_hf && !checkpoint.last_save_model_only) {
    fail_setting(config, "checkpoint.last_save_in_hf",
                 "needs checkpoint.last_save_model_only = true");
  }
  if (checkpoint.export_dtype == "float8_e4m3fn" && !checkpoint.last_save_in_hf) {
    fail_setting(
        config, "checkpoint.export_dtype",
        "float8_e4m3fn needs checkpoint.last_save_in_hf = true: only a Hugging Face folder "
        "can be FP8, a step-N never is; for that take bfloat16");
  }
}

void check_profiling(const JobConfig& config) {
  const auto& options = config.profiling;
  const int64_t watched = options.profiler_warmup + options.profiler_active;
  const bool records = options.enable_profiling || options.enable_memory_snapshot;
  if (!records || watched <= options.profile_freq) return;
  fail_setting(config, "profiling.profile_freq",
               fmt::format("{} is less than profiler_warmup + profiler_active = {}; raise it",
                           options.profile_freq, watched));
}

// A number of at least 1, or op. Other modes do not read it.
void check_activation_checkpoint(const JobConfig& config) {
  const auto& [mode, option] =
      std::tie(config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option);
  if (mode != "selective" || option == "op") return;
  int64_t number = 0;
  const char* end = option.data() + option.size();
  const auto [rest, error] = std::from_chars(option.data(), end, number);
  if (error == std::errc() && rest == end && number >= 1) return;
  fail_setting(
      config, "activation_checkpoint.selective_ac_option",
      fmt::format("\"{}\" is neither \"op\" nor a number n of at least 1, which recomputes "
                  "every n-th block; to recompute none or all set "
                  "activation_checkpoint.mode to \"none\" or \"full\"",
                  option));
}

// The warm-up stage trains the indexer alone, so a frozen indexer leaves nothing to train.
void check_dsa(const JobConfig& config) {
  if (config.dsa.stage == "dense_warmup" && !config.dsa.train_indexer) {
    fail_setting(config, "dsa.train_indexer",
                 "must be true with dsa.stage = \"dense_warmup\", which trains only the indexer");
  }
  if (config.dsa.stage == "dense_warmup" && config.dsa.indexer_loss_coeff == 0) {
    fail_setting(config, "dsa.indexer_loss_coeff",
                 "must be above 0 with dsa.stage = \"dense_warmup\": nothing else would learn");
  }
  if (config.dsa.stage == "dense_warmup" && config.model.name == "deepseek_v3") {
    fail_setting(config, "dsa.stage",
                 "\"dense_warmup\" trains only the indexer, and deepseek_v3 has none; set "
                 "model.name = \"deepseek_v32\"");
  }
}

}  // namespace

void settle(JobConfig& config) {
  auto& model = config.model;
  if (model.tokenizer_path && !model.tokenizer_path->empty()) {
    model.hf_assets_path = *model.tokenizer_path;
    config.origins["model.hf_assets_path"] = config.origin_of("model.tokenizer_path");
  }
  const auto has_files = [](const std::string& dataset, const std::optional<std::string>& path) {
    return dataset == "text" || (path && !path->empty() && dataset != "tokenized");
  };
  auto& training = config.training;
  auto& validation = config.validation;
  const bool mixed = !training.mix.empty() && training.dataset != "tokenized";
  if (mixed || has_files(training.dataset, training.dataset_path)) training.dataset = "files";
  if (has_files(validation.dataset, validation.dataset_path)) validation.dataset = "files";
  if (validation.split > 0 && !validation.dataset_path) validation.dataset = "files";
}

void validate(const JobConfig& config) {
  check_converters(config);
  check_mix(config);
  if (config.training.mix.empty()) {
    check_dataset(config, "training.dataset", config.training.dataset,
                  config.training.dataset_path);
  }
  check_packing(config);
  check_split(config);
  if (config.validation.enable && config.validation.split == 0) {
    check_dataset(config, "validation.dataset", config.validation.dataset,
                  config.validation.dataset_path);
  }
  check_batch(config);
  check_checkpoint(config);
  check_profiling(config);
  check_dsa(config);
  check_activation_checkpoint(config);
}

}  // namespace longhaul
