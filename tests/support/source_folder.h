// The repository's root, for tests that read its files.
#pragma once

#include <string>

namespace longhaul::test {

std::string source_folder();

}  // namespace longhaul::test
