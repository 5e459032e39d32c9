// Several datasets as one: each row comes from the one whose turn it is, in shares by weight. Whose
// turn it is depends on the row's number alone, so a mixture, too, has one number for its position.
// Called where a run opens its data.
#pragma once

#include <memory>
#include <vector>

#include "longhaul/data/dataset.h"

namespace longhaul::data {

// Whose turn it is: a pattern of kPeriod turns over and over. The members' counts stay near their
// shares at any point.
class Turns {
 public:
  static constexpr uint64_t kPeriod = uint64_t{1} << 16;

  // Weights above 0. UserError for more members than turns, or for a share below one turn.
  explicit Turns(const std::vector<double>& weights);

  size_t member(uint64_t turn) const;
  // How many of the turns before `turn` were the member's.
  uint64_t count_before(size_t member, uint64_t turn) const;
  // The turn that is the member's `nth`, from 0.
  uint64_t turn_of(size_t member, uint64_t nth) const;

 private:
  std::vector<uint16_t> members_;             // of each turn of the period
  std::vector<std::vector<uint32_t>> turns_;  // of each member in the period; ascending
};

class MixedDataset : public Dataset {
 public:
  // Rows of equal shapes, of one tokenizer. It ends, if its members do, with the first turn whose
  // member has no row left.
  MixedDataset(std::vector<std::unique_ptr<Dataset>> members, const std::vector<double>& weights);

  Row row(uint64_t index) const override;
  bool has_row(uint64_t index) const override;
  // Known when the end of any member is; reads the others up to there.
  std::optional<uint64_t> num_rows() const override;
  // The members' sums.
  DatasetInfo info() const override;
  DataIdentity identity() const override;
  int64_t bad_documents() const override;
  // Until each member was passed through once.
  uint64_t rows_in_a_pass() const override;
  RowShape shape() const override { return members_[0]->shape(); }
  std::optional<int64_t> label_bytes(const Row& row) const override;

 private:
  std::vector<std::unique_ptr<Dataset>> members_;
  Turns turns_;
};

}  // namespace longhaul::data
