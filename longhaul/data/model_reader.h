// Reads the model of a tokenizer.json: the rules of BPE, its vocabulary and its merges. Internal to
// the reading of tokenizer.json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "longhaul/data/bpe.h"
#include "longhaul/data/string_ids.h"
#include "longhaul/data/symbol_table.h"

namespace longhaul::data {

// UserError for a model other than BPE and for what of BPE is not supported (dropout).
SymbolRules read_rules(const nlohmann::json& model, bool byte_level);

// The ids by spelling. Ids may have gaps, but not be far beyond the number of tokens, for they
// index tables.
StringIds read_vocabulary(const nlohmann::json& model);

// The id of one token; UserError if it is not a number from 0 to `most`.
int32_t read_id(std::string_view spelling, const nlohmann::json& id, int64_t most);
// The highest id that a file with so many tokens may have.
int64_t highest_id(size_t num_tokens);

// Merges in both forms, "a b" and ["a", "b"].
std::vector<Merge> read_merges(const nlohmann::json& model, const StringIds& ids);

}  // namespace longhaul::data
