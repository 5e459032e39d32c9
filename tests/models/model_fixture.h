// Builds a model from a reference checkpoint and runs it, as the trainer would.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <fstream>
#include <memory>
#include <sstream>

#include "longhaul/models/deepseek_v3/hf_adapter.h"
#include "longhaul/models/deepseek_v3/model.h"
#include "longhaul/ops/cross_entropy/cross_entropy.h"
#include "tests/support/golden.h"

namespace longhaul::testing {

namespace v3 = deepseek_v3;

inline v3::ModelConfig golden_config(const std::string& folder) {
  const auto path = golden_path(folder) / "checkpoint/config.json";
  return v3::parse_model_config(read_file(path), path.string());
}

inline v3::HfSource source_of(const Tensors& tensors) {
  v3::HfSource source;
  source.origin = "test";
  for (const auto& [name, tensor] : tensors) source.names.push_back(name);
  source.shape = [&](const std::string& name) { return tensors.at(name).sizes().vec(); };
  source.load = [&](const std::string& name) { return tensors.at(name); };
  return source;
}

inline std::unique_ptr<v3::Model> golden_model(const std::string& folder,
                                               const v3::ModelSettings& settings) {
  auto model = std::make_unique<v3::Model>(golden_config(folder), settings);
  const Tensors weights = load_golden(folder + "/checkpoint/model.safetensors");
  v3::load_hf(*model, source_of(weights));
  return model;
}

// How a model computes: the form of MLA, and which operations have their fused kernels: "none",
// "all", or one alone.
struct Path {
  std::string name;
  v3::MlaForm form;
  std::string fused;
};

inline void PrintTo(const Path& path, std::ostream* out) { *out << path.name; }

inline std::vector<Path> reference_paths() {
  return {{"Absorbed", v3::MlaForm::kAbsorbed, "none"},
          {"Expanded", v3::MlaForm::kExpanded, "none"}};
}

// All fused kernels together and each operation's alone among reference operators, in both forms.
inline std::vector<Path> fused_paths() {
  const std::pair<const char*, const char*> operations[] = {{"", "all"},
                                                            {"Dsa", "dsa"},
                                                            {"RmsNorm", "rms_norm"},
                                                            {"Rope", "rope"},
                                                            {"Permute", "permute"},
                                                            {"Gmm", "gmm"},
                                                            {"CrossEntropy", "cross_entropy"}};
  std::vector<Path> paths;
  for (const auto& [name, operation] : operations) {
    paths.push_back({std::string("Fused") + name, v3::MlaForm::kAbsorbed, operation});
    paths.push_back({std::string("Fused") + name + "Expanded", v3::MlaForm::kExpanded, operation});
  }
  return paths;
}

// A model from a reference checkpoint that computes on that path.
inline std::unique_ptr<v3::Model> model_on(const std::string& folder, v3::ModelSettings settings,
                                           const Path& path) {
  settings.mla_form = path.form;
  auto model = golden_model(folder, settings);
  int fused = 0;
  for (const auto& slot : model->kernels()) {
    if (path.fused != "all" && path.fused != slot.operation) continue;
    *slot.kernel = ops::Kernel::kFused;
    ++fused;
  }
  EXPECT_EQ(fused == 0, path.fused == "none") << "no operation " << path.fused;
  return model;
}

// A batch of plain rows: input ids, next-token labels (last ignored), positions 0, 1, ...
inline v3::Batch plain_batch(const at::Tensor& ids_BS) {
  const auto ids = ids_BS.to(at::kLong);
  const int64_t B = ids.size(0), S = ids.size(1);
  const auto labels = at::cat({ids.narrow(1, 1, S - 1), at::full({B, 1}, -100, at::kLong)}, 1);
  const auto positions = at::arange(S, at::kLong).expand({B, S}).contiguous();
  return v3::prepare_batch(ids, labels, positions, S);
}

struct Losses {
  at::Tensor total;              // what backward starts from; auxiliary losses are attached
  std::vector<double> by_tower;  // mean cross-entropy
};

// `hidden_BSD`: what a part of a model starts from (Model::forward).
inline Losses forward_losses(v3::Model& model, const v3::Batch& batch, v3::ForwardContext& ctx,
                             double mtp_weight = 0.3, const at::Tensor& hidden_BSD = {}) {
  const auto hidden = model.forward(batch, ctx, hidden_BSD);
  Losses losses;
  for (size_t i = 0; i < hidden.size(); ++i) {
    const auto sum = model.cross_entropy(hidden[i], batch.towers[i].labels);
    const auto mean = sum / static_cast<double>(std::max<int64_t>(ctx.counts.labels[i], 1));
    losses.by_tower.push_back(mean.item<double>());
    const double weight = i == 0 ? 1.0 : mtp_weight / static_cast<double>(hidden.size() - 1);
    losses.total = i == 0 ? mean : losses.total + mean * weight;
  }
  return losses;
}

// Parameters and the routers' biases by Hugging Face name.
inline Tensors weights(v3::Model& model) {
  Tensors result;
  const auto add = [&](const auto& named) {
    for (auto& [name, view] : v3::hf_views(named.name, *named.tensor)) result[name] = view.detach();
  };
  for (const auto& parameter : model.parameters()) add(parameter);
  for (const auto& buffer : model.buffers()) add(buffer);
  return result;
}

// Gradients by Hugging Face name; parameters without a gradient are absent.
inline Tensors gradients(v3::Model& model) {
  Tensors result;
  for (const auto& parameter : model.parameters()) {
    if (!parameter.tensor->grad().defined()) continue;
    for (auto& [name, view] : v3::hf_views(parameter.name, parameter.tensor->grad())) {
      result[name] = view;
    }
  }
  return result;
}

inline void zero_gradients(v3::Model& model) {
  for (const auto& parameter : model.parameters()) parameter.tensor->mutable_grad() = at::Tensor();
}

inline void backward(const at::Tensor& loss) {
  if (loss.requires_grad()) torch::autograd::backward({loss}, {});
}

}  // namespace longhaul::testing
