#include "longhaul/checkpoint/shard_writer.h"

#include <atomic>
#include <map>
#include <optional>

#include "longhaul/base/background.h"
#include "longhaul/base/fault.h"

namespace longhaul::checkpoint {
namespace {

// Files of a rank that are written side by side.
constexpr int kLanes = 4;
// Smaller tensors are not worth a thread.
constexpr int64_t kSmallBytes = int64_t{1} << 20;

// Counts bytes that are done, for ShardWriterOptions::progress.
using Count = std::function<void(int64_t bytes)>;

// Files that are written one after another.
class Lane {
 public:
  // Without `beside` on the caller's thread.
  Lane(const Contents& contents, const ShardWriterOptions& options, bool beside, const Count& count)
      : contents_(contents), options_(options), beside_(beside), count_(count) {}

  // The next tensor of the lane.
  void write(const Shard& shard, size_t index, const at::Tensor& contents);
  bool failed() const { return background_.failed(); }
  // Throws the first error.
  void finish(Manifest& all);

 private:
  void open(const Shard& shard);
  void write_now(const Shard& shard, size_t index, const at::Tensor& host);
  void close(const Shard& shard);

  const Contents& contents_;
  const ShardWriterOptions& options_;
  const bool beside_;
  const Count& count_;
  Manifest part_;
  std::optional<safetensors::Writer> writer_;
  Background background_;  // last: its thread uses the others
};

void Lane::write(const Shard& shard, size_t index, const at::Tensor& contents) {
  const auto& info = shard.tensors[index];
  at::Tensor host;
  background_.run_here([&] {
    host = on_host(contents_.encode ? contents_.encode(info, contents) : contents, info);
  });
  const auto action = [this, &shard, index, host] { write_now(shard, index, host); };
  const bool is_last = index + 1 == shard.tensors.size();
  const bool beside = beside_ && (planned_bytes(info) >= kSmallBytes || is_last);
  beside ? background_.run(action) : background_.run_here(action);
}

void Lane::open(const Shard& shard) {
  writer_.emplace(options_.folder / shard.file, shard.tensors, options_.metadata,
                  safetensors::Writer::Order::kAsGiven);
}

void Lane::write_now(const Shard& shard, size_t index, const at::Tensor& host) {
  if (index == 0) open(shard);
  fault::at(options_.fault_place + ".tensor");
  const auto& planned = shard.tensors[index];
  const size_t bytes = host.nbytes();
  const std::string checksum = writer_->write(planned.name, host.const_data_ptr(), bytes, count_);
  const int64_t end = writer_->file_bytes();
  part_.tensors[planned.name] = {
      planned.dtype, planned.shape, checksum, {shard.file, end - narrow<int64_t>(bytes), end}};
  if (index + 1 == shard.tensors.size()) close(shard);
}

void Lane::close(const Shard& shard) {
  writer_->finish();
  part_.files[shard.file] = {writer_->file_bytes(), writer_->data_start(), writer_->header_hash()};
  writer_.reset();
  count_(0);
  fault::at(options_.fault_place + ".shard");
}

void Lane::finish(Manifest& all) {
  background_.finish();
  all.tensors.merge(part_.tensors);
  all.files.merge(part_.files);
}

// What each rank writes in the round that begins with turn `first`.
std::vector<std::string> written_in_round(const std::vector<Shard>& shards,
                                          const std::vector<Turn>& turns, size_t first, int ranks) {
  std::vector<std::string> written(static_cast<size_t>(ranks));
  for (size_t i = first; i < turns.size() && turns[i].round == turns[first].round; ++i) {
    const Turn& turn = turns[i];
    written[static_cast<size_t>(turn.writer)] = shards[turn.shard].tensors[turn.begin].name;
  }
  return written;
}

}  // namespace

Manifest write_shards(const std::vector<Shard>& shards, const Contents& contents,
                      const ShardWriterOptions& options) {
  const int rank = options.ranks == nullptr ? 0 : options.ranks->rank();
  const bool others_ask = contents.fetched && options.ranks != nullptr && options.ranks->size() > 1;
  // One fetched tensor at a time takes memory, unless other ranks would have to wait for it.
  const bool beside = !contents.fetched || others_ask;
  const bool at_hand = !contents.fetched && !contents.gather;
  const bool others_wait = others_ask || contents.gather;
  std::atomic<int64_t> done_bytes{0};
  const Count count = [&](int64_t bytes) {
    const int64_t done = done_bytes += bytes;
    if (options.progress) options.progress(done);
  };
  std::map<int, Lane> lanes;
  const auto turns = plan_turns(shards, at_hand ? kLanes : 1, contents.source);
  for (size_t t = 0; t < turns.size(); ++t) {
    const Turn& turn = turns[t];
    if (contents.gather && (t == 0 || turns[t - 1].round != turn.round)) {
      contents.gather(written_in_round(shards, turns, t, options.ranks->size()));
    }
    const bool own = turn.writer == rank;
    Lane* lane = own ? &lanes.try_emplace(turn.lane, contents, options, beside, count).first->second
                     : nullptr;
    for (size_t i = turn.begin; i < turn.end; ++i) {
      const auto& info = shards[turn.shard].tensors[i];
      if (own || others_ask) {
        const at::Tensor tensor = contents.of(info);
        if (own) lane->write(shards[turn.shard], i, tensor);
      }
      if (!own) count(planned_bytes(info));
    }
    if (own && !others_wait && lane->failed()) break;
  }
  Manifest all;
  for (auto& [number, lane] : lanes) lane.finish(all);
  return all;
}

}  // namespace longhaul::checkpoint
