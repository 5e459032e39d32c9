#include "longhaul/data/mixed_dataset.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "longhaul/base/error.h"
#include "longhaul/base/hash.h"

namespace longhaul::data {

// At each turn the member that is furthest behind its share; of equals the first.
Turns::Turns(const std::vector<double>& weights) : turns_(weights.size()) {
  LONGHAUL_CHECK(!weights.empty() && weights.size() <= std::numeric_limits<uint16_t>::max(),
                 "{} members", weights.size());
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (uint64_t turn = 0; turn < kPeriod; ++turn) {
    size_t next = 0;
    double furthest = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < weights.size(); ++i) {
      const double due = weights[i] / sum * static_cast<double>(turn + 1);
      const double behind = due - static_cast<double>(turns_[i].size());
      if (behind > furthest) {
        furthest = behind;
        next = i;
      }
    }
    members_.push_back(static_cast<uint16_t>(next));
    turns_[next].push_back(static_cast<uint32_t>(turn));
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!turns_[i].empty()) continue;
    fail_user("the weight {} is less than 1/{} of all weights ({}); raise it or leave the part out",
              weights[i], kPeriod, sum);
  }
}

size_t Turns::member(uint64_t turn) const { return members_[turn % kPeriod]; }

uint64_t Turns::count_before(size_t member, uint64_t turn) const {
  const auto& turns = turns_[member];
  const auto inside = std::lower_bound(turns.begin(), turns.end(), turn % kPeriod) - turns.begin();
  return turn / kPeriod * turns.size() + static_cast<uint64_t>(inside);
}

uint64_t Turns::turn_of(size_t member, uint64_t nth) const {
  const auto& turns = turns_[member];
  return nth / turns.size() * kPeriod + turns[nth % turns.size()];
}

MixedDataset::MixedDataset(std::vector<std::unique_ptr<Dataset>> members,
                           const std::vector<double>& weights)
    : members_(std::move(members)), turns_(weights) {
  LONGHAUL_CHECK(members_.size() == weights.size(), "{} datasets, {} weights", members_.size(),
                 weights.size());
  for (const auto& member : members_) {
    LONGHAUL_CHECK(member->shape().slots() == shape().slots(), "rows of {} and {} slots",
                   member->shape().slots(), shape().slots());
  }
}

Row MixedDataset::row(uint64_t index) const {
  const size_t member = turns_.member(index);
  return members_[member]->row(turns_.count_before(member, index));
}

bool MixedDataset::has_row(uint64_t index) const {
  for (size_t i = 0; i < members_.size(); ++i) {
    const uint64_t needed = turns_.count_before(i, index + 1);
    if (needed > 0 && !members_[i]->has_row(needed - 1)) return false;
  }
  return true;
}

std::optional<uint64_t> MixedDataset::num_rows() const {
  std::optional<uint64_t> first_end;
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto rows = members_[i]->num_rows();
    if (!rows) continue;
    const uint64_t end = turns_.turn_of(i, *rows);
    first_end = first_end ? std::min(*first_end, end) : end;
  }
  // One whose end is not known yet may end before.
  for (size_t i = 0; first_end && i < members_.size(); ++i) {
    const uint64_t needed = turns_.count_before(i, *first_end);
    if (needed == 0 || members_[i]->has_row(needed - 1)) continue;
    first_end = std::min(*first_end, turns_.turn_of(i, *members_[i]->num_rows()));
  }
  return first_end;
}

DatasetInfo MixedDataset::info() const {
  DatasetInfo sum;
  for (const auto& member : members_) {
    const DatasetInfo part = member->info();
    sum.documents += part.documents;
    sum.tokens += part.tokens;
    sum.labels += part.labels;
    sum.text_bytes += part.text_bytes;
    sum.rows += part.rows;
    sum.max_id = std::max(sum.max_id, part.max_id);
  }
  return sum;
}

DataIdentity MixedDataset::identity() const {
  DataIdentity identity = members_[0]->identity();
  std::string files;
  for (const auto& member : members_) files += member->identity().files + "\n";
  identity.files = hash_hex(files);
  return identity;
}

int64_t MixedDataset::bad_documents() const {
  int64_t sum = 0;
  for (const auto& member : members_) sum += member->bad_documents();
  return sum;
}

uint64_t MixedDataset::rows_in_a_pass() const {
  uint64_t rows = 0;
  for (size_t i = 0; i < members_.size(); ++i) {
    const uint64_t of_member = members_[i]->rows_in_a_pass();
    if (of_member > 0) rows = std::max(rows, turns_.turn_of(i, of_member - 1) + 1);
  }
  // Members that end may leave less.
  return std::min(rows, num_rows().value_or(rows));
}

std::optional<int64_t> MixedDataset::label_bytes(const Row& row) const {
  return members_[0]->label_bytes(row);
}

}  // namespace longhaul::data
