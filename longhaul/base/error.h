// Errors. Two kinds: `UserError` is a mistake in a job file, in data, in a checkpoint or on the
// command line; its message alone must tell what to do. `Error` is everything else and says where
// in the code a contract was broken. Everybody throws them; only cli/ catches them.
#pragma once

#include <fmt/format.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace longhaul {

// A broken contract inside the program; the message carries file and line.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A mistake of the user's; the message names the thing and the remedy.
class UserError : public Error {
 public:
  using Error::Error;
};

template <typename... Args>
[[noreturn]] void fail_user(fmt::format_string<Args...> format, Args&&... args) {
  throw UserError(fmt::format(format, std::forward<Args>(args)...));
}

namespace detail {
[[noreturn]] void throw_check_failed(const char* file, int line, const char* condition,
                                     const std::string& message);
[[noreturn]] void throw_narrow_failed(const std::string& value, const char* type);
}  // namespace detail

// LONGHAUL_CHECK(condition, format, args...): throws Error with file, line, condition and message.
#define LONGHAUL_CHECK(condition, ...)                                       \
  do {                                                                       \
    if (!(condition)) [[unlikely]] {                                         \
      ::longhaul::detail::throw_check_failed(__FILE__, __LINE__, #condition, \
                                             ::fmt::format(__VA_ARGS__));    \
    }                                                                        \
  } while (false)

// Integer conversion that throws Error when the value does not fit.
template <typename To, typename From>
To narrow(From value) {
  static_assert(std::is_integral_v<To> && std::is_integral_v<From>);
  const To result = static_cast<To>(value);
  if (static_cast<From>(result) != value || ((result < To{}) != (value < From{}))) {
    detail::throw_narrow_failed(std::to_string(value), sizeof(To) == 4 ? "int32" : "int64");
  }
  return result;
}

// a / b rounded up, for b > 0 and a >= 0.
constexpr long ceil_div(long a, long b) { return (a + b - 1) / b; }

// a / b; throws Error, naming `what`, when b does not divide a.
long div_exact(long a, long b, const char* what);

}  // namespace longhaul
