#include "longhaul/dtensor/rules/rules.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <string_view>

namespace longhaul::dtensor {
namespace {

struct Family {
  const char* file;
  std::initializer_list<std::string_view> words;  // of names
};

// In this order: "index_select" selects by index.
const Family kFamilies[] = {
    {"longhaul/dtensor/rules/factory.cpp", {"_like", "new_", "empty", "rand"}},
    {"longhaul/dtensor/rules/index.cpp",
     {"index", "gather", "scatter", "embedding", "take", "put", "cat", "stack", "masked_",
      "nonzero", "where", "one_hot"}},
    {"longhaul/dtensor/rules/matmul.cpp",
     {"mm", "mv", "dot", "matmul", "linear", "linalg", "einsum", "conv", "cholesky"}},
    {"longhaul/dtensor/rules/norms.cpp",
     {"_norm_backward", "layer_norm", "batch_norm", "group_norm"}},
    {"longhaul/dtensor/rules/reductions.cpp",
     {"sum", "mean", "max", "min", "norm", "var", "std", "prod", "softmax", "cum", "sort", "topk",
      "median", "any", "all", "flip", "tri", "loss"}},
    {"longhaul/dtensor/rules/views.cpp",
     {"view", "reshape", "expand", "permute", "transpose", "squeeze", "slice", "select", "split",
      "chunk", "unbind", "diagonal", "strided", "repeat", "roll", "pad", "fold"}},
};

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const auto& value) {
    return value.alias_info() != nullptr && !value.alias_info()->isWrite();
  });
}

}  // namespace

const char* rule_file_of(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::pointwise)) return "longhaul/dtensor/rules/pointwise.cpp";
  if (is_view(op.schema())) return "longhaul/dtensor/rules/views.cpp";
  if (op.hasTag(at::Tag::reduction)) return "longhaul/dtensor/rules/reductions.cpp";
  const std::string_view name = op.schema().name();
  for (const auto& [file, words] : kFamilies) {
    for (const auto word : words) {
      if (name.find(word, name.find("::") + 2) != std::string_view::npos) return file;
    }
  }
  return "longhaul/dtensor/rules/pointwise.cpp";
}

const RuleEntry* find_rule(const std::string& full_name) {
  static const RuleTable table = [] {
    RuleTable rules;
    add_pointwise_rules(rules);
    add_factory_rules(rules);
    add_view_rules(rules);
    add_matmul_rules(rules);
    add_reduction_rules(rules);
    add_index_rules(rules);
    add_norm_rules(rules);
    return rules;
  }();
  const auto found = table.find(full_name);
  return found == table.end() ? nullptr : &found->second;
}

}  // namespace longhaul::dtensor
