// A run's state as a checkpoint and back: weights and router biases under their names, moments
// under optimizer.exp_avg.<name> and optimizer.exp_avg_sq.<name>, the rest in the manifest's
// trainer object.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/base/safetensors.h"
#include "longhaul/base/text.h"
#include "longhaul/checkpoint/checkpoint_reader.h"
#include "longhaul/config/load.h"
#include "longhaul/config/write.h"
#include "longhaul/data/utf8.h"
#include "longhaul/dtensor/exchange.h"
#include "longhaul/train/data_source.h"
#include "longhaul/train/hf_export.h"
#include "longhaul/train/hf_import.h"
#include "longhaul/train/trainer.h"

namespace longhaul::train {
namespace {

constexpr const char* kExpAvg = "optimizer.exp_avg.";
constexpr const char* kExpAvgSq = "optimizer.exp_avg_sq.";

bool is_optimizer(const std::string& name) {
  return name.rfind(checkpoint::kOptimizerPrefix, 0) == 0;
}

std::vector<nn::NamedParameter> state_tensors(const deepseek_v3::Model& model) {
  auto all = model.parameters();
  for (auto& buffer : model.buffers()) all.push_back(buffer);
  return all;
}

// Nothing if this version takes the job no more: it was valid when it was saved, and the run goes
// on with another one in any case.
std::optional<JobConfig> parse_saved(const std::string& saved_job, const std::string& origin) {
  try {
    return parse_job(saved_job, origin);
  } catch (const UserError& error) {
    log::warn(
        "the job that the {} was made with is not valid in this version ({}); whether the data is "
        "the same is not checked",
        origin, error.what());
    return std::nullopt;
  }
}

// The saved hash of the data's files; nothing where that or the one of now is not known, as in
// checkpoints of earlier versions.
std::optional<std::string> saved_files(const nlohmann::json& trainer, const data::Dataset& data) {
  const auto saved = trainer.find("data");
  if (saved == trainer.end() || !saved->is_string() || *saved == "") return std::nullopt;
  if (data.identity().files.empty()) return std::nullopt;
  return saved->get<std::string>();
}

std::vector<double> weights_of(const Mix& mix) {
  std::vector<double> weights;
  for (const auto& part : mix) weights.push_back(part.weight);
  return weights;
}

// The data position counts rows; with other rows it points elsewhere. training.bad_documents moves
// none: what was read while a bad document was an error has none. Where the files are compared by
// their hash, they may lie elsewhere.
void warn_of_other_data(const std::string& saved_job, const JobConfig& config, bool files_known,
                        const std::string& origin) {
  const auto saved = parse_saved(saved_job, origin);
  if (!saved) return;
  const Training &before = saved->training, &now = config.training;
  const std::pair<const char*, bool> changed[] = {
      {"training.dataset", before.dataset != now.dataset},
      {"training.dataset_path", !files_known && before.dataset_path != now.dataset_path},
      {"training.seq_len", before.seq_len != now.seq_len},
      {"training.document_mask", before.document_mask != now.document_mask},
      {"training.mix",
       files_known ? weights_of(before.mix) != weights_of(now.mix) : before.mix != now.mix},
      {"training.text_field", before.text_field != now.text_field},
      {"training.invalid_text", before.invalid_text != now.invalid_text},
      {"training.packing", before.packing != now.packing},
      {"training.stream_above_mb", before.stream_above_mb != now.stream_above_mb},
      {"validation.split", saved->validation.split != config.validation.split}};
  for (const auto& [key, differs] : changed) {
    if (differs) {
      log::warn(
          "{} is not what the {} was made with: the data goes on at the same row number, which "
          "is another text now",
          key, origin);
    }
  }
}

void warn_of_other_files(const nlohmann::json& trainer, const data::Dataset& data,
                         const std::string& origin) {
  const auto saved = saved_files(trainer, data);
  if (!saved || *saved == data.identity().files) return;
  log::warn(
      "the names or sizes of the training data's files are not what the {} was made with: the data "
      "goes on at the same row number, which is another text now; bring the files back, or begin "
      "them anew with checkpoint.exclude_from_loading = [\"dataloader\"]",
      origin);
}

// To the model, ids of another tokenizer are other words.
void refuse_other_tokenizer(const nlohmann::json& trainer, const data::Dataset& data,
                            const JobConfig& config, const std::string& origin) {
  const auto saved = trainer.find("tokenizer");  // not there in checkpoints of earlier versions
  const uint64_t now = data.identity().tokenizer;
  if (saved == trainer.end() || !saved->is_number_unsigned() || now == 0) return;
  const auto before = saved->get<uint64_t>();
  if (before == 0 || before == now) return;
  const std::string place = trainer.value("tokenizer_path", "");
  fail_setting(
      config, config.model.tokenizer_path ? "model.tokenizer_path" : "model.hf_assets_path",
      fmt::format("the training data's ids are of another tokenizer (that of '{}') than the {} was "
                  "made with{}: to its model they are other words. Bring that one back; or, to "
                  "teach the model new ids, begin the data anew with "
                  "checkpoint.exclude_from_loading = [\"dataloader\"]",
                  tokenizer_place(config).string(), origin,
                  place.empty() ? "" : fmt::format(" (then in '{}')", place)));
}

std::string misshapen(const std::string& name, at::IntArrayRef shape, at::IntArrayRef wanted) {
  return fmt::format("{} is [{}], the model wants [{}]", name, fmt::join(shape, ", "),
                     fmt::join(wanted, ", "));
}

void refuse_misfits(const std::string& misfits, const std::string& origin) {
  if (misfits.empty()) return;
  fail_user(
      "{} does not fit the job's model: {}; set model.flavor to the model it was made with, or "
      "another checkpoint.folder",
      origin, misfits);
}

// The moments of a checkpoint beside the parameters that are trained.
struct MomentNames {
  std::vector<std::string> misfits;  // what is wrong, with the name
  std::vector<std::string> absent;   // parameters that had not been updated
  std::vector<std::string> spare;    // moments of nothing that is trained
};

MomentNames compare_moments(const std::vector<nn::NamedParameter>& parameters,
                            const checkpoint::CheckpointReader& reader,
                            const deepseek_v3::PartOf& part_of) {
  MomentNames found;
  const auto& steps = reader.manifest().trainer.at("optimizer_steps");
  const auto names = reader.names();
  std::set<std::string> left(names.begin(), names.end());
  for (const auto& parameter : parameters) {
    const bool expected = steps.contains(parameter.name);
    if (!expected) found.absent.push_back(parameter.name);
    const auto wanted = part_of(parameter).global_sizes;
    for (const char* prefix : {kExpAvg, kExpAvgSq}) {
      const std::string name = prefix + parameter.name;
      const bool present = left.erase(name) > 0;
      if (present != expected) {
        found.misfits.push_back(name + (present ? " has no count of steps" : " is missing"));
      } else if (present && reader.info(name).shape != wanted) {
        found.misfits.push_back(misshapen(name, reader.info(name).shape, wanted));
      }
    }
  }
  std::copy_if(left.begin(), left.end(), std::back_inserter(found.spare), is_optimizer);
  return found;
}

// The job's own path may be relative. A manifest holds UTF-8 only.
void remember_path(const char* key, const fs::path& path, nlohmann::json& trainer) {
  std::error_code error;
  const std::string absolute = path.empty() ? "" : fs::absolute(path, error).string();
  if (!absolute.empty() && data::is_valid_utf8(absolute)) trainer[key] = absolute;
}

// What `part`, of these sizes, is of a tensor. Of the others' rows nothing is read.
at::Tensor load_part(const checkpoint::TensorSource& source, const std::string& name,
                     const nn::Part& part, at::IntArrayRef sizes) {
  if (sizes.empty()) return source.load(name);
  const at::Tensor rows = source.load_rows(name, part.offsets[0], sizes[0]);
  return nn::take_part(rows, nn::within_rows(part, sizes), sizes);
}

}  // namespace

checkpoint::Snapshot Trainer::snapshot() const {
  checkpoint::Snapshot snapshot = weights(std::nullopt);
  snapshot.model_only = false;
  nlohmann::json& steps = snapshot.trainer["optimizer_steps"];
  for (const auto& state : parameters_) {
    const auto moments = optimizer_.state().find(state.name);
    if (moments == optimizer_.state().end()) continue;
    const auto& [exp_avg, exp_avg_sq, step] = moments->second;
    add_state(snapshot, kExpAvg + state.name, state, exp_avg, std::nullopt);
    add_state(snapshot, kExpAvgSq + state.name, state, exp_avg_sq, std::nullopt);
    steps[state.name] = step;
  }
  return snapshot;
}

// `tensor` is what this rank holds of it, and lies in it as parameter or buffer `of` does; it is
// saved in `dtype`, if given.
void Trainer::add_state(checkpoint::Snapshot& snapshot, const std::string& name,
                        const nn::NamedParameter& of, const at::Tensor& tensor,
                        std::optional<at::ScalarType> dtype) const {
  if (dims_.all->size() == 1 && !dtype) {
    snapshot.tensors[name] = tensor;
    return;
  }
  const nn::Part part = fsdp_->part_of(of);
  snapshot.tensors[name] = at::empty(
      part.global_sizes, at::device(at::kMeta).dtype(dtype.value_or(tensor.scalar_type())));
  snapshot.parts[name] = {tensor, part.offsets};
}

// Values may be out of range on one rank alone.
void Trainer::check_range(const checkpoint::Snapshot& snapshot) const {
  dtensor::together(dims_.all.get(), [&] {
    for (const auto& [name, part] : snapshot.parts) {
      to_dtype(name, part.tensor, snapshot.tensors.at(name).scalar_type());
    }
    return "";
  });
}

checkpoint::Snapshot Trainer::weights(std::optional<at::ScalarType> dtype) const {
  checkpoint::Snapshot snapshot;
  snapshot.step = progress_.step;
  snapshot.model_only = true;
  for (const auto& parameter : model_->parameters()) {
    add_state(snapshot, parameter.name, parameter, parameter.tensor->detach(), dtype);
  }
  for (const auto& bias : model_->buffers()) {
    const auto own = dtype ? std::optional(bias.tensor->scalar_type()) : std::nullopt;
    add_state(snapshot, bias.name, bias, *bias.tensor, own);
  }
  if (dtype == at::kHalf) check_range(snapshot);
  snapshot.trainer = {{"step", progress_.step},
                      {"rows", progress_.rows},
                      {"tokens", progress_.tokens},
                      {"seed", seed_of(config_)},
                      {"data", dataset_->identity().files},
                      {"tokenizer", dataset_->identity().tokenizer},
                      {"optimizer_steps", nlohmann::json::object()},
                      {"model_config", deepseek_v3::to_hf_json(model_->config())},
                      {"job", to_toml(config_)}};
  // For the way to Hugging Face's form, from wherever that is.
  remember_path("hf_assets_path", config_.model.hf_assets_path, snapshot.trainer);
  remember_path("tokenizer_path", tokenizer_place(config_), snapshot.trainer);
  return snapshot;
}

void Trainer::restore(const std::filesystem::path& step_folder, const Excluded& excluded) {
  const checkpoint::CheckpointReader reader(step_folder);
  const auto& trainer = reader.manifest().trainer;
  const std::string origin = fmt::format("checkpoint of step {}", reader.manifest().step);
  if (!excluded.data) refuse_other_tokenizer(trainer, *dataset_, config_, origin);
  refuse_misfits(find_misfits(*model_, reader, part_of()), origin);
  if (!excluded.optimizer) check_moments(reader, origin);
  load_model_tensors(*model_, reader, origin, part_of());
  if (!excluded.optimizer) restore_moments(reader);
  if (!excluded.data) progress_.rows = trainer.at("rows").get<uint64_t>();
  if (!excluded.step) {
    progress_.step = trainer.at("step").get<int64_t>();
    progress_.tokens = trainer.at("tokens").get<int64_t>();
  }
  if (excluded.data) return;
  warn_of_other_data(trainer.at("job").get<std::string>(), config_,
                     saved_files(trainer, *dataset_).has_value(), origin);
  warn_of_other_files(trainer, *dataset_, origin);
  if (trainer.at("seed").get<uint64_t>() != seed_of(config_)) {
    log::warn("{} was made with debug.seed = {}, the job says {}: the data order changes here",
              origin, trainer.at("seed").get<uint64_t>(), seed_of(config_));
  }
}

// Before anything is overwritten. Parameters that no step has updated have no moments.
void Trainer::check_moments(const checkpoint::CheckpointReader& reader,
                            const std::string& origin) const {
  const auto [misfits, absent, spare] = compare_moments(parameters_, reader, part_of());
  if (!misfits.empty()) {
    fail_user(
        "{}: its optimizer's state does not fit the job's model: {}; go on from another "
        "checkpoint, "
        "or leave it out with checkpoint.exclude_from_loading = [\"optimizer\"]",
        origin, list_of(misfits, "; "));
  }
  if (!absent.empty()) {
    log::warn("{} has no moments of {}, which start at zero", origin, list_of(absent, ", "));
  }
  if (!spare.empty()) {
    log::warn("{} has moments of what is not trained, which are left out: {}", origin,
              list_of(spare, ", "));
  }
}

void Trainer::restore_moments(const checkpoint::CheckpointReader& reader) {
  std::map<std::string, optim::AdamW::State> moments;
  const auto& steps = reader.manifest().trainer.at("optimizer_steps");
  for (const auto& parameter : parameters_) {
    if (!steps.contains(parameter.name)) continue;
    const auto load = [&](const char* prefix) {
      const at::Tensor part = load_part(reader, prefix + parameter.name, fsdp_->part_of(parameter),
                                        parameter.tensor->sizes());
      return part.to(model_->settings().device, model_->settings().param_dtype).contiguous();
    };
    moments[parameter.name] = {load(kExpAvg), load(kExpAvgSq),
                               steps.at(parameter.name).get<int64_t>()};
  }
  optimizer_.set_state(std::move(moments));
}

void Trainer::load_weights(const std::string& path, bool hugging_face) {
  if (hugging_face) {
    load_hf_folder(*model_, path,
                   {.quantized = config_.checkpoint.initial_load_in_hf_quantized,
                    .compare_copies = dims_.is_first(),
                    .part_of = part_of()});
  } else {
    const checkpoint::CheckpointReader reader(path);
    load_model_tensors(*model_, reader, reader.path().string(), part_of());
  }
}

std::string find_misfits(const deepseek_v3::Model& model, const checkpoint::TensorSource& source,
                         const deepseek_v3::PartOf& part_of) {
  std::vector<std::string> problems;
  const auto names = source.names();
  const std::set<std::string> present(names.begin(), names.end());
  std::set<std::string> known;
  for (const auto& state : state_tensors(model)) {
    known.insert(state.name);
    const auto sizes = part_of(state).global_sizes;
    if (present.count(state.name) == 0) {
      problems.push_back(state.name + " is missing");
    } else if (const auto& shape = source.info(state.name).shape; shape != sizes) {
      problems.push_back(misshapen(state.name, shape, sizes));
    }
  }
  for (const auto& name : names) {
    if (!is_optimizer(name) && known.count(name) == 0) problems.push_back(name + " is unexpected");
  }
  return list_of(problems, "; ");
}

void load_model_tensors(deepseek_v3::Model& model, const checkpoint::TensorSource& source,
                        const std::string& origin, const deepseek_v3::PartOf& part_of) {
  refuse_misfits(find_misfits(model, source, part_of), origin);
  const at::NoGradGuard no_grad;
  for (const auto& state : state_tensors(model)) {
    state.tensor->copy_(load_part(source, state.name, part_of(state), state.tensor->sizes()));
  }
}

}  // namespace longhaul::train
