#include "longhaul/dtensor/collective_log.h"

namespace longhaul::dtensor {

const char* name_of(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::kAllGather:
      return "all_gather";
    case CollectiveKind::kReduceScatter:
      return "reduce_scatter";
    case CollectiveKind::kAllReduce:
      return "all_reduce";
    case CollectiveKind::kAllToAll:
      return "all_to_all";
    case CollectiveKind::kBroadcast:
      return "broadcast";
    case CollectiveKind::kBarrier:
      return "barrier";
  }
  return "?";
}

uint64_t CollectiveLog::append(CollectiveRecord record) {
  std::lock_guard lock(mutex_);
  Total& total = totals_[{record.kind, record.axis}];
  ++total.count;
  total.bytes += record.bytes;
  records_.push_back(std::move(record));
  const uint64_t ticket = first_ticket_ + records_.size() - 1;
  if (records_.size() > limit_) {
    records_.pop_front();
    ++first_ticket_;
  }
  return ticket;
}

void CollectiveLog::finish(uint64_t ticket, int64_t end_ns) {
  std::lock_guard lock(mutex_);
  if (ticket < first_ticket_) return;
  records_[ticket - first_ticket_].end_ns = end_ns;
}

std::vector<CollectiveRecord> CollectiveLog::records() const {
  std::lock_guard lock(mutex_);
  return {records_.begin(), records_.end()};
}

CollectiveLog::Total CollectiveLog::total(CollectiveKind kind, const std::string& axis) const {
  std::lock_guard lock(mutex_);
  const auto found = totals_.find({kind, axis});
  return found == totals_.end() ? Total{} : found->second;
}

CollectiveLog::Total CollectiveLog::total(CollectiveKind kind) const {
  std::lock_guard lock(mutex_);
  Total sum;
  for (const auto& [key, total] : totals_) {
    if (key.first != kind) continue;
    sum.count += total.count;
    sum.bytes += total.bytes;
  }
  return sum;
}

void CollectiveLog::clear() {
  std::lock_guard lock(mutex_);
  first_ticket_ += records_.size();
  records_.clear();
  totals_.clear();
}

}  // namespace longhaul::dtensor
