// Faults on demand, so that tests can end a program at a place that matters. A place has a name;
// the environment variable LONGHAUL_FAULT=<place>[:<nth>][:<kind>] makes its nth visit (default 1)
// fail: `kill` (default; SIGKILL to this process), `hang` (that thread waits for ever), `throw`
// (fault::Injected) or `enospc` (as if the disk were full). Nothing here belongs to what a user
// sees. The CMake option LONGHAUL_FAULTS=OFF compiles all places out; without a fault in sight a
// place costs one load and one branch.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "longhaul/base/error.h"

#ifndef LONGHAUL_FAULTS
#define LONGHAUL_FAULTS 0
#endif

namespace longhaul::fault {

inline constexpr bool kCompiledIn = LONGHAUL_FAULTS != 0;

// What kind `throw` throws.
class Injected : public Error {
 public:
  using Error::Error;
};

namespace detail {
int visit(std::string_view place);
[[noreturn]] void throw_errno(std::string_view place, int code);
}  // namespace detail

// For a place next to a system call: the errno to pretend, or 0.
inline int errno_at([[maybe_unused]] std::string_view place) {
  if constexpr (kCompiledIn) return detail::visit(place);
  return 0;
}

// For any other place; `enospc` throws a FileError.
inline void at(std::string_view place) {
  if (const int code = errno_at(place)) detail::throw_errno(place, code);
}

// For tests in one process: the same as LONGHAUL_FAULT, while this object lives. UserError on a bad
// specification.
class Armed {
 public:
  explicit Armed(std::string_view specification);
  Armed(const Armed&) = delete;
  ~Armed();
};

// For tests: records every visit as "<place>:<nth>" while this object lives, so that a test can
// fail each of them in turn.
class Trace {
 public:
  Trace();
  Trace(const Trace&) = delete;
  ~Trace();
  std::vector<std::string> visits() const;
};

}  // namespace longhaul::fault
