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
  drop_oldest();
  return ticket;
}

void CollectiveLog::drop_oldest() {
  while (records_.size() > limit_) {
    records_.pop_front();
    ++first_ticket_;
  }
}

void CollectiveLog::set_limit(size_t limit) {
  std::lock_guard lock(mutex_);
  limit_ = limit;
  drop_oldest();
}

void CollectiveLog::finish(uint64_t ticket, int64_t end_ns) {
  std::lock_guard lock(mutex_);
  if (ticket >= first_ticket_) records_[ticket - first_ticket_].end_ns = end_ns;
}

void CollectiveLog::add_time(CollectiveKind kind, const std::string& axis, int64_t under_way_ns,
                             int64_t waited_ns) {
  std::lock_guard lock(mutex_);
  Total& total = totals_[{kind, axis}];
  total.under_way_ns += under_way_ns;
  total.waited_ns += waited_ns;
}

void CollectiveLog::fail(uint64_t ticket) {
  std::lock_guard lock(mutex_);
  if (ticket >= first_ticket_) records_[ticket - first_ticket_].failed = true;
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
    sum.under_way_ns += total.under_way_ns;
    sum.waited_ns += total.waited_ns;
  }
  return sum;
}

CollectiveLog::Totals CollectiveLog::totals() const {
  std::lock_guard lock(mutex_);
  return totals_;
}

CollectiveLog::Totals since(const CollectiveLog::Totals& before, const CollectiveLog::Totals& now) {
  CollectiveLog::Totals added;
  for (const auto& [key, total] : now) {
    const auto old = before.find(key);
    const auto was = old == before.end() ? CollectiveLog::Total{} : old->second;
    const CollectiveLog::Total more = {total.count - was.count, total.bytes - was.bytes,
                                       total.under_way_ns - was.under_way_ns,
                                       total.waited_ns - was.waited_ns};
    if (more.count > 0 || more.under_way_ns > 0) added[key] = more;
  }
  return added;
}

void CollectiveLog::clear() {
  std::lock_guard lock(mutex_);
  first_ticket_ += records_.size();
  records_.clear();
  totals_.clear();
}

}  // namespace longhaul::dtensor
