#include "longhaul/parallel/context.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "longhaul/base/text.h"
#include "longhaul/dtensor/dtensor.h"
#include "longhaul/ops/cross_entropy/cross_entropy.h"
#include "longhaul/parallel/collectives.h"

namespace longhaul::parallel {
namespace {

using deepseek_v3::SliceRun;
using deepseek_v3::Slots;

int64_t chunks_of(int64_t ranks, SequenceSplit split) {
  return split == SequenceSplit::kHeadTail ? 2 * ranks : ranks;
}

Tensor positions_of(const std::vector<SliceRun>& runs) {
  std::vector<Tensor> positions;
  for (const auto& run : runs) {
    positions.push_back(at::arange(run.position, run.position + run.count, at::kLong));
  }
  return at::cat(positions);
}

int64_t count(const Tensor& mask) { return mask.sum().item<int64_t>(); }

Slots slice_of_slots(const Slots& whole, const Tensor& positions) {
  const auto own = [&](const Tensor& x) { return x.index_select(1, positions); };
  Slots slice;
  slice.input_ids = own(whole.input_ids);
  slice.labels = own(whole.labels);
  slice.positions = own(whole.positions);
  slice.doc_start = own(whole.doc_start);
  slice.valid = own(whole.valid);
  slice.last_key = positions.expand_as(slice.doc_start).contiguous();
  slice.num_tokens = count(slice.valid);
  slice.num_labels = count(slice.labels != ops::kIgnoredLabel);
  return slice;
}

// Gathers rows of the ranks and puts them into the order of the sequence.
class GatheredSequence : public deepseek_v3::SequenceCut {
 public:
  GatheredSequence(const ContextOptions& options, int64_t seq_len) : group_(options.group) {
    std::vector<Tensor> positions;
    for (int64_t rank = 0; rank < group_->size(); ++rank) {
      const auto runs = slice_of_rank(seq_len, group_->size(), options.split, rank);
      positions.push_back(positions_of(runs));
      if (rank == group_->rank()) runs_ = runs;
    }
    if (options.split == SequenceSplit::kContiguous) return;  // they arrive in order
    const Tensor position_of_row = at::cat(positions);
    const Tensor row_of_position =
        at::empty_like(position_of_row)
            .scatter_(0, position_of_row, at::arange(seq_len, at::kLong));
    position_of_row_ = position_of_row.to(options.device);
    row_of_position_ = row_of_position.to(options.device);
  }

  // Tensor parallelism cuts the slice once more: it is put together first, and the whole is then on
  // all ranks of that axis.
  Tensor gather(const Tensor& x_BS) const override {
    if (!dtensor::is_dtensor(x_BS)) return gather_slices(x_BS);
    const auto& mesh = dtensor::spec_of(x_BS).mesh;
    return dtensor::from_local(gather_slices(dtensor::full_tensor(x_BS)), mesh,
                               {dtensor::Placement::replicate()});
  }

  Tensor gather_slices(const Tensor& x_BS) const {
    Tensor rows_SB = all_gather_rows(x_BS.transpose(0, 1), group_);
    if (row_of_position_.defined()) {
      rows_SB = permute_rows(rows_SB, row_of_position_, position_of_row_);
    }
    return rows_SB.transpose(0, 1).contiguous();
  }

  Tensor sum(const Tensor& statistic) const override { return sum_over(statistic, group_); }

  const std::vector<SliceRun>& runs() const override { return runs_; }

 private:
  Group group_;
  std::vector<SliceRun> runs_;
  Tensor position_of_row_, row_of_position_;
};

std::string last_part(const std::string& path) { return path.substr(path.rfind('.') + 1); }

SequenceSplit split_of(const JobConfig& config) {
  return config.parallelism.context_parallel_load_balancer == "none" ? SequenceSplit::kContiguous
                                                                     : SequenceSplit::kHeadTail;
}

// The name of the kind that the job asks for.
std::string kind_of(const JobConfig& config, const ContextParallelKinds& kinds) {
  const char* key = "parallelism.custom_context_parallel_path";
  if (!config.parallelism.enable_custom_context_parallel) return "dsa";
  const std::string& path = config.parallelism.custom_context_parallel_path;
  if (path.empty()) return "dsa";
  const std::string name = last_part(path);
  if (kinds.count(name) > 0) return name;
  std::vector<std::string> known;
  for (const auto& [kind, factory] : kinds) known.push_back(kind);
  fail_setting(config, key,
               fmt::format("unknown context parallelism '{}'{}; known are {}", path,
                           did_you_mean(name, known), fmt::join(known, ", ")));
}

}  // namespace

void check_sequence_split(int64_t seq_len, int64_t ranks, SequenceSplit split) {
  const int64_t chunks = chunks_of(ranks, split);
  if (seq_len >= chunks && seq_len % chunks == 0) return;
  fail_user(
      "{} slots cannot be dealt to {} ranks in {} chunks{}; make it a multiple of {}, or lower "
      "parallelism.context_parallel_degree",
      seq_len, ranks, chunks,
      split == SequenceSplit::kHeadTail ? " (one from the head and one from the tail each)" : "",
      chunks);
}

std::vector<SliceRun> slice_of_rank(int64_t seq_len, int64_t ranks, SequenceSplit split,
                                    int64_t rank) {
  check_sequence_split(seq_len, ranks, split);
  const int64_t chunk = seq_len / chunks_of(ranks, split);
  std::vector<SliceRun> runs = {{.slot = 0, .position = rank * chunk, .count = chunk}};
  if (split == SequenceSplit::kHeadTail) {
    runs.push_back({.slot = chunk, .position = (2 * ranks - 1 - rank) * chunk, .count = chunk});
  }
  return runs;
}

deepseek_v3::Batch ContextParallel::cut(const deepseek_v3::Batch& whole) const {
  LONGHAUL_CHECK(whole.cut == nullptr, "this batch holds slices of sequences already");
  const int64_t seq_len = whole.towers.at(0).input_ids.size(1);
  deepseek_v3::Batch slice;
  slice.cut = sequence_cut(seq_len);
  const Tensor positions = positions_of(slice.cut->runs());
  for (const auto& slots : whole.towers) slice.towers.push_back(slice_of_slots(slots, positions));
  return slice;
}

std::shared_ptr<const deepseek_v3::SequenceCut> DsaContextParallel::sequence_cut(
    int64_t seq_len) const {
  return std::make_shared<GatheredSequence>(options(), seq_len);
}

ContextParallelKinds built_in_context_parallel() {
  const auto dsa = [](const ContextOptions& options) {
    return std::make_unique<DsaContextParallel>(options);
  };
  return {{"dsa", dsa}, {"AscendDSAContextParallelContext", dsa}};
}

void check_context_parallel(const JobConfig& config, int64_t ranks,
                            const ContextParallelKinds& kinds) {
  if (ranks == 1) return;
  kind_of(config, kinds);
  if (config.parallelism.context_parallel_rotate_method == "alltoall") {
    fail_setting(config, "parallelism.context_parallel_rotate_method",
                 "\"alltoall\": key rows are gathered, they do not go round; set it to "
                 "\"allgather\"");
  }
  const auto check_split = [&](const char* key, int64_t seq_len) {
    name_setting(config, key, [&] { check_sequence_split(seq_len, ranks, split_of(config)); });
  };
  check_split("training.seq_len", config.training.seq_len);
  if (config.validation.enable) check_split("validation.seq_len", config.validation.seq_len);
}

std::unique_ptr<ContextParallel> make_context_parallel(const JobConfig& config, const Group& group,
                                                       at::Device device,
                                                       const ContextParallelKinds& kinds) {
  if (group->size() == 1) return nullptr;
  check_context_parallel(config, group->size(), kinds);
  return kinds.at(kind_of(config, kinds))(
      {.group = group, .split = split_of(config), .device = device});
}

}  // namespace longhaul::parallel
