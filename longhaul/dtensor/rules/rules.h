// The sharding rules, a file for each family of operators. To add one: write a Rule (op_call.h) in
// the file of its family and put it under the operator's full name into that file's table.
#pragma once

#include <string>
#include <unordered_map>

#include "longhaul/dtensor/op_call.h"

namespace longhaul::dtensor {

using RuleTable = std::unordered_map<std::string, RuleEntry>;

void add_pointwise_rules(RuleTable& table);
void add_factory_rules(RuleTable& table);
void add_view_rules(RuleTable& table);
void add_matmul_rules(RuleTable& table);
void add_reduction_rules(RuleTable& table);
void add_index_rules(RuleTable& table);
void add_norm_rules(RuleTable& table);

}  // namespace longhaul::dtensor
