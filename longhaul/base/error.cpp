#include "longhaul/base/error.h"

#include <cstring>

namespace longhaul {
namespace detail {

void throw_check_failed(const char* file, int line, const char* condition,
                        const std::string& message) {
  const char* inside = std::strstr(file, "longhaul/");
  throw Error(fmt::format("{} [{} at {}:{}]", message, condition, inside ? inside : file, line));
}

void throw_narrow_failed(const std::string& value, const char* type) {
  throw Error(fmt::format("the value {} does not fit into {}", value, type));
}

}  // namespace detail

long div_exact(long a, long b, const char* what) {
  LONGHAUL_CHECK(b > 0 && a % b == 0, "{}: expected a multiple of {}, got {}", what, b, a);
  return a / b;
}

}  // namespace longhaul
