#include "longhaul/data/document.h"

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"

namespace longhaul::data {
namespace {

constexpr int64_t kMostTold = 10;

}  // namespace

bool Split::takes(uint64_t text_hash) const {
  const bool in_validation = static_cast<double>(text_hash >> 11) * 0x1.0p-53 < fraction;
  return in_validation == held_out;
}

void BadDocuments::add(const std::string& place, const std::string& reason) {
  if (!skip_) {
    fail_user(
        "{}: {}; correct it, or have such documents left out: training.bad_documents = \"skip\", "
        "or --bad-documents skip of `longhaul data`",
        place, reason);
  }
  const int64_t number = ++count_;
  if (number > kMostTold) return;
  log::warn("{}: {}: left out{}", place, reason,
            number == kMostTold ? "; further ones are only counted" : "");
}

}  // namespace longhaul::data
