// What a rank leaves behind when its job fails, or when it is asked to: its log of collectives as a
// JSON file, one a rank, in a folder of the run. Reads them again; trace_report.h compares them.
//
//   {"run": "...", "rank": 0, "ranks": 2, "written": 1.7e9, "reason": "...",
//    "groups":  [{"name": "loss:0,1#0", "axis": "loss", "ranks": [0, 1]}, ...],
//    "records": [{"group": 0, "sequence": 7, "kind": "all_reduce", "bytes": 8, "sizes": [1],
//                 "dtype": "int64", "start": 1.7e9, "end": 1.7e9, "state": "done"}, ...]}
//
// Times are seconds since 1970; "end" is null and "state" is "under way" or "failed" for those that
// have not ended. Records stand in the order in which they began.
#pragma once

#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "longhaul/dtensor/collective_log.h"

namespace longhaul::dtensor {

class World;

class FlightRecorder {
 public:
  struct Options {
    std::filesystem::path folder;
    std::string prefix = "rank_";  // of the file's name, before rank and ".json"
    size_t records = 20'000;       // that the world's log keeps from now on; 0: none, and no files
  };
  // `world` must outlive it. Of a single rank nothing is written.
  FlightRecorder(const World& world, Options options);

  // Write or replace this rank's file; any thread may call them, also while the rank hangs. Return
  // its path, or nullopt where nothing is recorded or the file cannot be written (a warning). One
  // that was asked for does not replace that of a failure, which it returns.
  std::optional<std::filesystem::path> dump_failure(const std::string& reason) noexcept;
  std::optional<std::filesystem::path> dump_asked(const std::string& reason) noexcept;

 private:
  std::optional<std::filesystem::path> dump(const std::string& reason) const noexcept;

  const World& world_;
  Options options_;
  std::mutex mutex_;  // one file, which one thread at a time writes
  std::optional<std::filesystem::path> of_failure_;
};

struct TracedCollective {
  enum class State { kDone, kUnderWay, kFailed };

  CollectiveGroup group;
  uint64_t sequence = 0;
  std::string kind;  // "all_reduce"
  int64_t bytes = 0;
  std::vector<int64_t> sizes;
  std::string dtype;
  double start = 0;
  std::optional<double> end;
  State state = State::kDone;

  std::string text() const;  // "all_reduce #7 on axis loss (8 B, int64 [1])"
};

struct Trace {
  std::string run;  // alike on all ranks of a job
  int rank = 0, ranks = 1;
  double written = 0;
  std::string reason;
  std::vector<TracedCollective> records;
};

// The traces in `folder` of the run that wrote last, by rank. UserError if there are none.
std::vector<Trace> read_traces(const std::filesystem::path& folder);

}  // namespace longhaul::dtensor
