#include "longhaul/train/dump.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "longhaul/base/file.h"
#include "longhaul/checkpoint/tensor_file.h"
#include "longhaul/models/deepseek_v3/hf_adapter.h"

namespace longhaul::train {

void dump_step(const std::filesystem::path& folder, const deepseek_v3::Model& model,
               const parallel::Fsdp& fsdp, const StepMetrics& metrics, bool is_first) {
  const at::NoGradGuard no_grad;
  const auto dtype = model.settings().param_dtype == at::kDouble ? at::kDouble : at::kFloat;
  checkpoint::TensorMap tensors;
  const auto add = [&](const char* prefix, const nn::NamedParameter& of, const at::Tensor& x) {
    const at::Tensor whole = fsdp.whole_of(of, x);
    if (!is_first) return;
    for (const auto& [hf_name, view] : deepseek_v3::hf_views(of.name, whole)) {
      tensors[prefix + hf_name] = view.to(at::kCPU, dtype).contiguous();
    }
  };
  for (const auto& parameter : model.parameters()) {
    add("param.", parameter, *parameter.tensor);
    if (parameter.tensor->grad().defined()) add("grad.", parameter, parameter.tensor->grad());
  }
  for (const auto& buffer : model.buffers()) add("param.", buffer, *buffer.tensor);
  if (!is_first) return;

  const auto scalar = [](double value) { return at::full({1}, value, at::kDouble); };
  tensors["loss"] = scalar(metrics.loss);
  tensors["lm_loss"] = scalar(metrics.lm_loss);
  tensors["mtp_loss"] = scalar(metrics.mtp_loss);
  tensors["balance_loss"] = scalar(metrics.balance_loss);
  tensors["z_loss"] = scalar(metrics.z_loss);
  tensors["grad_norm"] = scalar(metrics.grad_norm);
  tensors["indexer_loss_per_layer"] = at::tensor(metrics.indexer_loss_per_layer, at::kDouble);
  create_folders(folder);
  checkpoint::save_safetensors(folder / fmt::format("step-{}.safetensors", metrics.step), tensors);
}

}  // namespace longhaul::train
