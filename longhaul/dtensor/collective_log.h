// What one rank communicated: kind, mesh axis, bytes, shape, start and end of each collective. It
// feeds tests, metrics and the report of a collective that hangs. Thread-safe; bounded.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace longhaul::dtensor {

enum class CollectiveKind {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kBroadcast,
  kBarrier
};

const char* name_of(CollectiveKind kind);  // "all_gather", ...

struct CollectiveRecord {
  CollectiveKind kind = CollectiveKind::kBarrier;
  std::string axis = {};
  int64_t bytes = 0;                // of this rank's input
  std::vector<int64_t> sizes = {};  // of this rank's input
  std::string dtype = {};           // "bfloat16"; empty for a barrier
  uint64_t sequence = 0;            // counts the collectives of the group, from 1
  int64_t start_ns = 0,
          end_ns = 0;  // steady clock; end 0 while under way, and for good if it failed
};

class CollectiveLog {
 public:
  // How many collectives, and the bytes of this rank's inputs to them.
  struct Total {
    int64_t count = 0;
    int64_t bytes = 0;
  };

  // Keeps the newest `limit` records; totals go on counting.
  explicit CollectiveLog(size_t limit = 4096) : limit_(limit) {}
  CollectiveLog(const CollectiveLog&) = delete;

  // Adds a collective that starts; returns what finish() wants.
  uint64_t append(CollectiveRecord record);
  // Its end; without effect if the record was dropped or cleared in the meantime.
  void finish(uint64_t ticket, int64_t end_ns);

  std::vector<CollectiveRecord> records() const;  // oldest first
  // Since the start or the last clear(), dropped records included.
  Total total(CollectiveKind kind, const std::string& axis) const;
  Total total(CollectiveKind kind) const;
  void clear();

 private:
  const size_t limit_;
  mutable std::mutex mutex_;
  std::deque<CollectiveRecord> records_;
  uint64_t first_ticket_ = 0;  // of records_.front()
  std::map<std::pair<CollectiveKind, std::string>, Total> totals_;
};

}  // namespace longhaul::dtensor
