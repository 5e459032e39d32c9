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

Strings model_names() { return {"deepseek_v3", "deepseek_v32"}; }

}  // namespace longhaul
