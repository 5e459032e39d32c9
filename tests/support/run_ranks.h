// Ranks as threads of the test: run_ranks(size, f) calls f(World&) once a rank, each on a thread of
// its own with one compute thread, and ends when all have ended.
#pragma once

#include <ATen/Parallel.h>

#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "longhaul/dtensor/world.h"

namespace longhaul::test {

enum class Transport { kThreads, kGloo };

inline const char* name_of(Transport transport) {
  return transport == Transport::kThreads ? "threads" : "gloo";
}

struct RankOptions {
  Transport transport = Transport::kThreads;
  dtensor::SlowLink link = {};                // threads only
  std::chrono::milliseconds timeout{30'000};  // of each collective
};

// The first exception of any rank; one that only reports another rank's failure counts if there is
// nothing else.
class FirstFailure {
 public:
  void add(int rank, const std::string& text, bool of_another_rank) {
    std::lock_guard lock(mutex_);
    if (!text_.empty() && (of_another_rank || !of_another_rank_)) return;
    text_ = fmt::format("rank {}: {}", rank, text);
    of_another_rank_ = of_another_rank;
  }
  void rethrow() const {
    if (!text_.empty()) throw Error(text_);
  }

 private:
  std::mutex mutex_;
  std::string text_;
  bool of_another_rank_ = false;
};

// Throws Error("rank R: ...") for the first failure; a rank that fails takes the others with it.
inline void run_ranks(int size, const std::function<void(dtensor::World&)>& body,
                      const RankOptions& options = {}) {
  dtensor::ThreadGroup group(size, options.link);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int own_threads = at::get_num_threads();
  FirstFailure failure;
  const auto run_rank = [&](int rank) {
    at::set_num_threads(1);
    try {
      dtensor::World world = options.transport == Transport::kThreads
                                 ? dtensor::World::thread(group, rank)
                                 : dtensor::World::gloo_threads(store, rank, size);
      world.set_timeout(options.timeout);
      body(world);
    } catch (const std::exception& error) {
      failure.add(rank, error.what(),
                  dynamic_cast<const dtensor::CollectiveError*>(&error) != nullptr);
      group.abort(rank, error.what());  // gloo: the world's end closed the connections
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run_rank, rank);
  for (auto& thread : threads) thread.join();
  at::set_num_threads(own_threads);  // new threads would otherwise start with one
  failure.rethrow();
}

}  // namespace longhaul::test
