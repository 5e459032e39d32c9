#include "longhaul/checkpoint/saver.h"

#include <chrono>

#include "longhaul/base/log.h"
#include "longhaul/base/text.h"

namespace longhaul::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

Saver::Saver(SaverOptions options, dtensor::Communicator ranks)
    : options_(std::move(options)), ranks_(std::move(ranks)) {}

Saver::~Saver() {
  if (under_way_.valid()) under_way_.wait();
}

void Saver::save(const Snapshot& snapshot) {
  const auto start = Clock::now();
  collect();
  ranks_.set_timeout(options_.timeout);
  const SaveOptions options{.ranks = &ranks_, .pin_memory = options_.mode == AsyncMode::kPinned};
  if (options_.mode == AsyncMode::kDisabled) {
    done(checkpoint::save(options_.folder, snapshot, options), seconds_since(start));
  } else {
    staged_ = stage(snapshot, options, std::move(staged_.contents));
    under_way_ = std::async(std::launch::async, [this, options, start] {
      done(checkpoint::save(options_.folder, staged_, options), seconds_since(start));
    });
  }
}

void Saver::done(const fs::path& saved, double seconds) const {
  if (ranks_.rank() != 0) return;
  checkpoint::purge(options_.folder, options_.keep_latest_k);
  log::info("saved {} in {}", saved.string(), human_seconds(seconds));
}

// Waits for the save under way and keeps what it failed with.
void Saver::collect() {
  if (!under_way_.valid()) return;
  try {
    under_way_.get();
  } catch (const std::exception& error) {
    failure_ = error.what();
  }
}

std::optional<std::string> Saver::failure() {
  const bool ended = under_way_.valid() &&
                     under_way_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  if (ended) collect();
  return std::exchange(failure_, std::nullopt);
}

void Saver::finish() {
  collect();
  if (failure_) throw UserError(*std::exchange(failure_, std::nullopt));
}

}  // namespace longhaul::checkpoint
