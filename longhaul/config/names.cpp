#include "longhaul/config/names.h"

namespace longhaul {

Strings dataset_names() {
  return {"files", "text", "tokenized", "c4", "c4_test", "c4_validation", "enwiki-eod"};
}

bool is_available_dataset(const std::string& name) {
  return name == "files" || name == "text" || name == "tokenized";
}

Strings converter_names() {
  Strings names;
  for (const char* kernel : {"dsa", "rms_norm", "rope", "permute", "gmm", "cross_entropy"}) {
    names.push_back(kernel);
    names.push_back(std::string("npu_") + kernel);
  }
  for (const char* matrix : {"linear", "grouped_mm"}) {
    for (const char* format : {"float8", "mx"}) {
      names.push_back(std::string("quantize.") + matrix + "." + format);
    }
  }
  return names;
}

Strings savable_operator_names() {
  return {"linear",          "linear_by_head",         "grouped_matmul",
          "flash_attention", "sparse_flash_attention", "all_to_all",
          "all_gather",      "reduce_scatter",         "all_reduce"};
}

Strings model_names() { return {"deepseek_v3", "deepseek_v32"}; }

}  // namespace longhaul
