// Saving and resuming a run's state. A checkpoint is a folder `step-N` that is either complete or
// absent: it is prepared under a hidden name, synced, and renamed; its manifest.json vouches for
// every byte. Holds no policy of when to save. Called by train/ (one writer at a time) and cli/.
//
//   <folder>/step-100/model-00001.safetensors      whole tensors, at most about 4 GiB a file
//                     optimizer-00001.safetensors  those whose name begins with "optimizer."
//                     manifest.json
//   <folder>/.step-110.tmp-<pid>/                  a save in progress, or one that died
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "longhaul/checkpoint/tensor_file.h"
#include "longhaul/dtensor/communicator.h"

namespace longhaul::checkpoint {

inline constexpr std::string_view kOptimizerPrefix = "optimizer.";

// What a rank holds of a tensor: a box in it that begins at `offsets` (one a dim), of any dtype.
struct TensorPart {
  at::Tensor tensor;
  std::vector<int64_t> offsets;
};

class PartPlan;

struct Snapshot {
  int64_t step = 0;
  // Weights only: cannot be resumed from, and keeps its place when older ones are purged.
  bool model_only = false;
  TensorMap tensors;
  // Where there are any, `tensors` has only shapes, on the Meta device, and this is what the rank
  // holds of each. The boxes of two ranks are the same one or have no element in common; all
  // together are the tensor.
  std::map<std::string, TensorPart> parts = {};
  // Of the parts, if stage() has already told the ranks what each holds (part_gather.h).
  std::shared_ptr<const PartPlan> plan = {};
  // Where it is set, `tensors` has only shapes, and, as there are no parts, this has their
  // contents: it is asked once for each, in the same order by all ranks that save together (so it
  // may be a collective).
  std::function<at::Tensor(const std::string& name)> fetch = {};
  // What else the run needs: schedule, RNG, data position, the job file. A JSON object; text in it
  // must be UTF-8, and NaN does not survive.
  nlohmann::json trainer = nlohmann::json::object();
};

struct SaveOptions {
  // A shard is closed before it exceeds this; a larger tensor gets a shard of its own.
  int64_t max_shard_bytes = int64_t{4} << 30;
  // Ranks that save together: all call save() with snapshots of the same names and shapes, and each
  // writes a share of the files. Null: this one alone.
  const dtensor::Communicator* ranks = nullptr;
  // stage() only: into memory that a CUDA device copies to without the host.
  bool pin_memory = false;
  // Called with every piece that is written and after every step of the save: one that hangs calls
  // it no more. By any of its threads, and by several at once.
  std::function<void()> progress = {};
};

// Writes `<folder>/step-<N>` and returns its path; a step-N that is already there is replaced in
// one move (where the file system cannot exchange two folders, in two). Where tensors are fetched
// it takes the memory of one, on ranks of two: one is written while the next is put together. Parts
// go over `ranks` to the rank that writes the tensor, each element once, and take the memory of
// three tensors. On an error (UserError: disk, permissions) nothing new is under the final name and
// every other checkpoint is untouched; where ranks save together, all throw and name the rank.
// Refuses to put a model-only checkpoint in the place of a full one. Removes what saves that died
// have left. A CollectiveError means that the ranks have lost one another: `ranks` is of no use any
// more, and the folder under the hidden name stays, since others may still write to it. Fault
// points: checkpoint.begin, .tensor, .shard, .manifest, .rename, .renamed, .done; where a step is
// replaced .exchange, too, and if that takes two moves (kind einval) .aside and .replaced.
fs::path save(const fs::path& folder, const Snapshot& snapshot, const SaveOptions& options = {});

// What every save does first: removes what saves and exports that died have left in the folder, and
// gives a step that one had moved aside its name back.
void clear_stale(const fs::path& folder);

// A copy on the host, of which save() makes the same files: what the snapshot was made of may
// change. Of parts that several ranks hold, one copies it, and the others keep its shape; of whole
// tensors each copies what it writes. Collective where ranks save together. Tensors of `reused`,
// from an earlier call, are written over where they fit, so that saving again and again takes no
// new memory.
Snapshot stage(const Snapshot& snapshot, const SaveOptions& options = {}, Snapshot reused = {});

// Reads a step-N folder. With `verify`, all checksums first. UserError that names file and tensor
// for anything damaged, truncated or missing; sizes, shapes and places are checked in any case.
Snapshot load(const fs::path& step_folder, bool verify = true);

// The step folder to resume from: the newest (load_step -1) that is full and complete and whose
// checksums hold; nothing if there is none. Each one passed over is logged with the reason. Another
// load_step must be usable: UserError that says why it is not. load(path, false) suffices after it.
// Without `verify` checksums are left out: only the manifest and the presence, sizes and headers of
// the files count. Collective over `ranks`, if given: the first looks, each reads a share of the
// bytes, and all get the same answer.
std::optional<fs::path> find_resumable(const fs::path& folder, int64_t load_step = -1,
                                       bool verify = true,
                                       const dtensor::Communicator* ranks = nullptr);

// The step folder to read weights from: as above with load_step -1, but a model-only one will do.
std::optional<fs::path> find_weights(const fs::path& folder, bool verify = true,
                                     const dtensor::Communicator* ranks = nullptr);

struct PurgeOptions {
  int keep_latest_k = 0;  // 0: all
  int64_t saved_step = 0;
  // Steps that the run found there and did not go on from.
  std::set<int64_t> others = {};
  // Called before each is deleted.
  std::function<void()> progress = {};
};

// After `saved_step` was saved: deletes full checkpoints older than the keep_latest_k newest
// complete ones up to that one, which always stays. Neither counted nor deleted are later steps and
// `others`, which are another history and may be damaged in ways that sizes do not show; model-only
// checkpoints; and what has no valid manifest, or one of another step. An incomplete one does not
// count, so a usable one always stays. One that cannot be deleted is named in a warning. Fault
// points: checkpoint.purge, .purged.
void purge(const fs::path& folder, const PurgeOptions& options);

// The full checkpoints of steps after `step` that lie in the folder.
std::set<int64_t> find_later_steps(const fs::path& folder, int64_t step);

// A folder whose whole name is `step-<N>`, N without leading zeros.
struct StepFolder {
  int64_t step = 0;
  fs::path path;
};

// N of `step-<N>`, -1 for any other name.
int64_t step_of(const std::string& name);

// Those in `folder`, newest first; empty if `folder` does not exist.
std::vector<StepFolder> list_steps(const fs::path& folder);

// `<folder>/step-<N>`.
fs::path step_path(const fs::path& folder, int64_t step);

// `<folder>/step-<N>-hf`, for a Hugging Face folder of a step (train/hf_export.h). Nothing here
// reads or purges it, but what an export that died has left is cleared away.
fs::path export_path(const fs::path& folder, int64_t step);

// N of `step-<N>-hf`, -1 for any other name.
int64_t step_of_export(const std::string& name);

}  // namespace longhaul::checkpoint
