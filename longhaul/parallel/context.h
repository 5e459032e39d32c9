// Context parallelism: the ranks of the "cp" axis share each sequence. A batch is prepared whole,
// so that document edges and the MTP modules' shifts are settled, and then cut; the model works on
// its slice, and what it needs of the others it asks for through Batch::cut (models' SequenceCut).
// Gradients of the weights are partial sums: cp is one of the axes over which they are added up.
// Called by the trainer.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "longhaul/models/deepseek_v3/batch.h"
#include "longhaul/parallel/parallel_dims.h"

namespace longhaul::parallel {

using at::Tensor;

// Which slots a rank takes. Head-tail: of 2 cp chunks rank r has r and 2 cp - 1 - r, so that all
// have about as many visible keys.
enum class SequenceSplit { kContiguous, kHeadTail };

// Throws UserError, naming seq_len and what would divide it, unless a sequence of `seq_len` slots
// can be dealt to `ranks` ranks.
void check_sequence_split(int64_t seq_len, int64_t ranks, SequenceSplit split);

// The slots of rank `rank` of `ranks`, by runs. UserError as above.
std::vector<deepseek_v3::SliceRun> slice_of_rank(int64_t seq_len, int64_t ranks,
                                                 SequenceSplit split, int64_t rank);

struct ContextOptions {
  Group group;  // the cp axis
  SequenceSplit split = SequenceSplit::kHeadTail;
  at::Device device = at::kCPU;  // where the model computes
};

// Cuts batches. How layers reach the other slices is left to the derived classes.
class ContextParallel {
 public:
  explicit ContextParallel(ContextOptions options) : options_(std::move(options)) {}
  virtual ~ContextParallel() = default;

  // This rank's slice of every row of `whole`, on the host; its counts are those of the slice. The
  // result may outlive this object. UserError as check_sequence_split.
  deepseek_v3::Batch cut(const deepseek_v3::Batch& whole) const;

 protected:
  // The layers' way to the other slices of sequences of `seq_len` slots.
  virtual std::shared_ptr<const deepseek_v3::SequenceCut> sequence_cut(int64_t seq_len) const = 0;
  const ContextOptions& options() const { return options_; }

 private:
  ContextOptions options_;
};

// For MLA with and without DeepSeek Sparse Attention: every rank gathers the narrow key rows of the
// whole sequence (latents, rope keys, index keys) and computes its own queries.
class DsaContextParallel : public ContextParallel {
 public:
  using ContextParallel::ContextParallel;

 protected:
  std::shared_ptr<const deepseek_v3::SequenceCut> sequence_cut(int64_t seq_len) const override;
};

using ContextParallelFactory =
    std::function<std::unique_ptr<ContextParallel>(const ContextOptions&)>;
// By the name that a job file gives.
using ContextParallelKinds = std::map<std::string, ContextParallelFactory>;

// "dsa", also under the name of the class that the DeepSeek-V3.2 recipe asks for.
ContextParallelKinds built_in_context_parallel();

// The kind that parallelism.custom_context_parallel_path names, by the last part of the path, where
// parallelism.enable_custom_context_parallel is set; else "dsa". nullptr for a group of one rank.
// UserError as check_context_parallel.
std::unique_ptr<ContextParallel> make_context_parallel(
    const JobConfig& config, const Group& group, at::Device device,
    const ContextParallelKinds& kinds = built_in_context_parallel());

// Throws UserError, naming the key, for an unknown kind, for what is not supported and for
// sequences (training.seq_len, validation.seq_len) that cannot be dealt to `ranks` ranks. For use
// before anything is allocated.
void check_context_parallel(const JobConfig& config, int64_t ranks,
                            const ContextParallelKinds& kinds = built_in_context_parallel());

}  // namespace longhaul::parallel
