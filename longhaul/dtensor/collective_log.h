// What one rank communicated: kind, mesh axis, bytes, shape, start and end of each collective. It
// feeds tests, metrics and the flight recorder. Thread-safe; bounded.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
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

// Ranks that communicate; the name is the same on all of them, and no other group of theirs has it.
struct CollectiveGroup {
  std::string name, axis;
  std::vector<int> global_ranks;
};

struct CollectiveRecord {
  CollectiveKind kind = CollectiveKind::kBarrier;
  std::string axis = {};
  std::shared_ptr<const CollectiveGroup> group = {};
  int64_t bytes = 0;                // of this rank's input
  std::vector<int64_t> sizes = {};  // of this rank's input
  std::string dtype = {};           // "bfloat16"; empty for a barrier
  uint64_t sequence = 0;            // counts the collectives of the group, from 1
  int64_t start_ns = 0,
          end_ns = 0;  // steady clock; end 0 while under way, and for good if it failed
  bool failed = false;
};

class CollectiveLog {
 public:
  // How many collectives, the bytes of this rank's inputs to them, and of those that ended the time
  // from their start to their end and the part of it in which the rank did nothing but wait.
  struct Total {
    int64_t count = 0;
    int64_t bytes = 0;
    int64_t under_way_ns = 0, waited_ns = 0;
  };
  using Totals = std::map<std::pair<CollectiveKind, std::string>, Total>;  // by kind and axis

  // Keeps the newest `limit` records; totals go on counting.
  explicit CollectiveLog(size_t limit = 4096) : limit_(limit) {}
  CollectiveLog(const CollectiveLog&) = delete;

  // Adds a collective that starts; returns what finish() wants.
  uint64_t append(CollectiveRecord record);
  // Its end, or its failure; without effect if the record was dropped or cleared in the meantime.
  void finish(uint64_t ticket, int64_t end_ns);
  void fail(uint64_t ticket);
  // What one that ended adds to the totals.
  void add_time(CollectiveKind kind, const std::string& axis, int64_t under_way_ns,
                int64_t waited_ns);

  std::vector<CollectiveRecord> records() const;  // oldest first
  // Since the start or the last clear(), dropped records included.
  Total total(CollectiveKind kind, const std::string& axis) const;
  Total total(CollectiveKind kind) const;
  Totals totals() const;
  void clear();
  // Keeps that many from now on, perhaps none.
  void set_limit(size_t limit);

 private:
  void drop_oldest();  // down to the limit

  size_t limit_;
  mutable std::mutex mutex_;
  std::deque<CollectiveRecord> records_;
  uint64_t first_ticket_ = 0;  // of records_.front()
  Totals totals_;
};

// What was added to `before` since.
CollectiveLog::Totals since(const CollectiveLog::Totals& before, const CollectiveLog::Totals& now);

}  // namespace longhaul::dtensor
