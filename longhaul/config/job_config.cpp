#include "longhaul/config/job_config.h"

namespace longhaul {

std::string Origin::text() const {
  switch (kind) {
    case Kind::kDefault:
      return "default";
    case Kind::kFile:
      return file + ":" + std::to_string(line);
    case Kind::kCommandLine:
      return "command line";
  }
  return "";
}

Origin JobConfig::origin_of(const std::string& key) const {
  const auto found = origins.find(key);
  return found == origins.end() ? Origin{} : found->second;
}

void fail_setting(const JobConfig& config, const std::string& key, const std::string& why) {
  fail_user("{}: {}: {}", config.origin_of(key).text(), key, why);
}

}  // namespace longhaul
