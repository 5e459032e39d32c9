// Regular expressions in Oniguruma's Ruby syntax, as tokenizer.json files have them, in PCRE2's
// words. What means something else there is translated; everything that is not known to mean the
// same is refused by name. Called by Regex.
#pragma once

#include <string>
#include <string_view>

namespace longhaul::data {

// UserError for what has no counterpart or is not supported.
std::string translate_ruby_pattern(std::string_view pattern);

}  // namespace longhaul::data
