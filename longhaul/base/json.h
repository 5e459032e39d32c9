// Strict JSON for files that the program trusts: a syntax error or a repeated key is a UserError
// with file and line. Not a fast parser; for gigabytes of JSONL see data/.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace longhaul {

// `where` names the text in messages, usually its path.
nlohmann::json parse_json(std::string_view text, const std::string& where);

}  // namespace longhaul
