#include "longhaul/dtensor/rules/rules.h"

namespace longhaul::dtensor {

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
