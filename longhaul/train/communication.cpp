#include <fmt/format.h>

#include "longhaul/train/metrics.h"

namespace longhaul::train {

void add_communication(const dtensor::CollectiveLog::Totals& totals, double seconds,
                       StepMetrics& metrics) {
  double waited = 0;
  for (const auto& [key, total] : totals) {
    const auto& [kind, axis] = key;
    auto& of = metrics.comm[fmt::format("{}.{}", axis, dtensor::name_of(kind))];
    of = {total.count, total.bytes, 1e-9 * static_cast<double>(total.under_way_ns),
          1e-9 * static_cast<double>(total.waited_ns)};
    // A save in the background waits on a thread of its own.
    if (axis != "checkpoint") waited += of.waited_seconds;
  }
  metrics.comm_wait_share = seconds > 0 ? waited / seconds : 0;
}

}  // namespace longhaul::train
