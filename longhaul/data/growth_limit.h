// How long a text may become on its way through a tokenizer.json's components, so that a hostile
// file ends in an error and not in the machine's whole memory. Called by those that change text.
#pragma once

#include <cstddef>

namespace longhaul::data {

// Compatibility forms make 11 times the bytes of a character; a few Replaces on top.
constexpr size_t most_bytes_from(size_t size) { return (size_t{1} << 20) + 64 * size; }

}  // namespace longhaul::data
