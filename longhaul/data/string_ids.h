// A map from strings to ids that is searched with a string_view. Called by the tokenizer's parts.
#pragma once

#include <xxhash.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

namespace longhaul::data {

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return XXH3_64bits(text.data(), text.size()); }
};

template <typename Value>
using StringMap = std::unordered_map<std::string, Value, StringHash, std::equal_to<>>;
using StringIds = StringMap<int32_t>;

}  // namespace longhaul::data
