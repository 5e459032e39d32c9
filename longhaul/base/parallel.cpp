#include "longhaul/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "longhaul/base/quiet.h"

namespace longhaul {

void parallel_tasks(size_t count, const std::function<void(size_t)>& task, size_t max_threads) {
  std::vector<std::exception_ptr> errors(count);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < count; i = next++) {
      try {
        task(i);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    }
  };
  const size_t cores = std::max<size_t>(1, std::thread::hardware_concurrency());
  const size_t threads = std::min(count, max_threads == 0 ? cores : max_threads);
  {
    std::vector<std::jthread> others;
    const auto work_quietly = [&work, quiet = is_quiet()] {
      const Quiet as_the_caller(quiet);
      work();
    };
    for (size_t i = 1; i < threads; ++i) others.emplace_back(work_quietly);
    work();
  }
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace longhaul
