#include "longhaul/ops/kernel.h"

#include <mutex>
#include <set>

#include "longhaul/base/log.h"

namespace longhaul::ops {

void report_fallback(const std::string& op, const std::string& reason) {
  static std::mutex mutex;
  static std::set<std::string> said;
  const std::string text = op + ": the fused kernel is not used: " + reason;
  const std::lock_guard lock(mutex);
  if (said.insert(text).second) log::warn("{}", text);
}

}  // namespace longhaul::ops
