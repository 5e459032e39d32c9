// Text that should be UTF-8 and may be broken: where it breaks, and how it reads all the same. Each
// maximal ill-formed part becomes one U+FFFD, as Python's errors="replace" and the Unicode standard
// have it (chapter 3, "U+FFFD substitution of maximal subparts"). Called by whoever reads text from
// disk or from a command line; data/utf8.h has what large texts need.
#pragma once

#include <string>
#include <string_view>

namespace longhaul {

// Where the first ill-formed part begins; npos if there is none.
size_t first_invalid_utf8(std::string_view text);

// `text` with every ill-formed part replaced by U+FFFD.
std::string repair_utf8(std::string_view text);

}  // namespace longhaul
