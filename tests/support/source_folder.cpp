#include "tests/support/source_folder.h"

namespace longhaul::test {

std::string source_folder() { return LONGHAUL_SOURCE_FOLDER; }

}  // namespace longhaul::test
