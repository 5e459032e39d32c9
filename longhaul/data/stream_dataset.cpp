#include "longhaul/data/stream_dataset.h"

#include <chrono>

#include "longhaul/base/error.h"
#include "longhaul/base/log.h"
#include "longhaul/base/quiet.h"
#include "longhaul/base/text.h"

namespace longhaul::data {
namespace {

constexpr size_t kChunksAhead = 2;
constexpr std::chrono::seconds kTellEvery{15};

}  // namespace

StreamDataset::StreamDataset(Sources sources, const std::optional<Tokenizer>& tokenizer,
                             const StreamOptions& options, std::unique_ptr<BadDocuments> bad)
    : shape_(options.packing.shape),
      repeat_(options.packing.repeat),
      shared_(std::make_unique<Shared>(std::move(sources), tokenizer, options, std::move(bad))) {}

bool StreamDataset::Shared::has_work() const {
  if (wanted < first_row()) return true;
  if (end && next_row == *end) return false;
  size_t ahead = 0;
  for (const auto& chunk : window) ahead += chunk->first > wanted;
  return next_row <= wanted || ahead < kChunksAhead;
}

std::shared_ptr<const PackedChunk> StreamDataset::Shared::find(uint64_t row) const {
  for (const auto& chunk : window) {
    if (row >= chunk->first && row < chunk->end) return chunk;
  }
  return nullptr;
}

void StreamDataset::Shared::read_next(std::unique_lock<std::mutex>& lock,
                                      const std::stop_token& stop) {
  if (wanted < first_row()) {
    window.clear();
    walk.restart();
  }
  const uint64_t target = wanted;
  lock.unlock();
  auto chunk = walk.next(target, stop);
  lock.lock();
  next_row = walk.row();
  pass_rows = walk.rows_in_a_pass();
  if (!chunk) {
    end = next_row;
    return;
  }
  // Behind a jump nothing that was read before is of use.
  if (!window.empty() && window.back()->end != chunk->first) window.clear();
  window.push_back(std::make_shared<const PackedChunk>(std::move(*chunk)));
  drop_chunks();
}

// What is behind the wanted row and has no room. One chunk there stays, for rows that are asked for
// twice.
void StreamDataset::Shared::drop_chunks() {
  uint64_t bytes = 0;
  for (const auto& chunk : window) {
    bytes += static_cast<uint64_t>(chunk->rows->info().tokens) * sizeof(int32_t);
  }
  while (bytes > keep_bytes && window.size() > 2 && window[1]->end <= wanted) {
    bytes -= static_cast<uint64_t>(window[0]->rows->info().tokens) * sizeof(int32_t);
    window.pop_front();
  }
}

void StreamDataset::Shared::produce(std::stop_token stop, bool quiet) {
  const Quiet as_the_caller(quiet);
  std::unique_lock lock(mutex);
  while (changed.wait(lock, stop, [&] { return has_work(); })) {
    try {
      read_next(lock, stop);
    } catch (const Stopped&) {
      return;
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      failure = std::current_exception();
      changed.notify_all();
      return;
    }
    changed.notify_all();
  }
}

void StreamDataset::start() const {
  if (producer_.joinable()) return;
  producer_ = std::jthread([shared = shared_.get(), quiet = is_quiet()](std::stop_token stop) {
    shared->produce(stop, quiet);
  });
}

void StreamDataset::wait_for(uint64_t row, std::unique_lock<std::mutex>& lock,
                             const std::function<bool()>& found) const {
  while (!shared_->changed.wait_for(lock, kTellEvery, found)) {
    log::info("looking for row {} of the data: at row {}, {} read so far",
              with_commas(static_cast<int64_t>(row)),
              with_commas(static_cast<int64_t>(shared_->next_row)),
              human_bytes(static_cast<double>(shared_->walk.bytes_read())));
  }
}

std::shared_ptr<const PackedChunk> StreamDataset::chunk_of(uint64_t row) const {
  const std::lock_guard turn(one_at_a_time_);
  start();
  std::unique_lock lock(shared_->mutex);
  const auto is_behind_end = [&] { return shared_->end && row >= *shared_->end; };
  if (!is_behind_end()) {
    shared_->wanted = row;
    shared_->changed.notify_all();
  }
  std::shared_ptr<const PackedChunk> chunk;
  wait_for(row, lock, [&] {
    chunk = shared_->find(row);
    return chunk || shared_->failure || is_behind_end();
  });
  if (!chunk && shared_->failure) std::rethrow_exception(shared_->failure);
  return chunk;
}

Row StreamDataset::row(uint64_t index) const {
  const auto chunk = chunk_of(index);
  LONGHAUL_CHECK(chunk, "row {} of {}", index, num_rows().value_or(0));
  return chunk->rows->row(index - chunk->first);
}

bool StreamDataset::has_row(uint64_t index) const { return repeat_ || chunk_of(index); }

std::optional<uint64_t> StreamDataset::num_rows() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->end;
}

uint64_t StreamDataset::rows_in_a_pass() const {
  while (true) {
    uint64_t next = 0;
    {
      const std::lock_guard lock(shared_->mutex);
      if (shared_->pass_rows) return *shared_->pass_rows;
      next = shared_->next_row;
    }
    chunk_of(next);
  }
}

std::optional<int64_t> StreamDataset::label_bytes(const Row& row) const {
  return bytes_of_labels(row, shape_.seq_len, shared_->walk.token_bytes());
}

}  // namespace longhaul::data
