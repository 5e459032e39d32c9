// Faults on demand, so that tests can end a program at a place that matters. A place has a name;
// the environment variable LONGHAUL_FAULT=<place>[:<nth>][:<kind>][:rank-<r>] makes its nth visit
// (default 1) fail, on every rank of a job or on the one whose RANK is r. Several are separated by
// commas; of two for the same visit the first counts. Kinds:
//   kill    SIGKILL to this process (default)      throw   fault::Injected
//   hang    the thread waits for ever              enospc  as if the disk were full
//   delay   the thread sleeps for a second, or     short   a write takes only half of the bytes
//           as delay-<ms> says
//   flip    a write stores one bit wrong           wait    the thread waits until Armed is gone
//   einval  as if the system had no such call
// A place that is not in kPlaces is an error. Nothing here belongs to what a user sees. The CMake
// option LONGHAUL_FAULTS=OFF compiles all places out; without a fault in sight a place costs one
// load and one branch.
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

// All that there are; those that begin with "test." are known as well.
inline constexpr std::string_view kPlaces[] = {
    "checkpoint.aside",    "checkpoint.begin",    "checkpoint.done",   "checkpoint.exchange",
    "checkpoint.manifest", "checkpoint.purge",    "checkpoint.purged", "checkpoint.rename",
    "checkpoint.renamed",  "checkpoint.replaced", "checkpoint.shard",  "checkpoint.tensor",
    "file.rename",         "file.sync",           "file.sync_parent",  "file.write",
    "hf_folder.index",     "hf_folder.rename",    "hf_folder.shard",   "hf_folder.tensor",
    "train.step"};

// Reads LONGHAUL_FAULT, and says in the log, of rank 0, that it is set. UserError if it is wrong.
// Called by main before anything else.
void announce();

// What kind `throw` throws.
class Injected : public Error {
 public:
  using Error::Error;
};

// What a place is to do: an errno to pretend, or a write to damage.
struct Order {
  int code = 0;
  bool short_write = false;
  bool flipped_bit = false;
};

namespace detail {
Order visit(std::string_view place);
[[noreturn]] void throw_errno(std::string_view place, int code);
}  // namespace detail

// For a place that writes.
inline Order order_at([[maybe_unused]] std::string_view place) {
  if constexpr (kCompiledIn) return detail::visit(place);
  return {};
}

// For a place next to another system call: the errno to pretend, or 0.
inline int errno_at(std::string_view place) { return order_at(place).code; }

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
