// The post_processor of a tokenizer.json: which special tokens stand around a text. Encoding adds
// none by itself; the template only tells which token begins and which ends a text. Known:
// TemplateProcessing, ByteLevel (which concerns offsets only), Sequence of them, and none; anything
// else is a UserError that names it. Called by the reading of tokenizer.json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

namespace longhaul::data {

struct SpecialTokensAround {
  std::optional<std::string> before, after;  // the outermost ones, by their spelling
};

SpecialTokensAround read_post_processor(const nlohmann::json& description);

}  // namespace longhaul::data
