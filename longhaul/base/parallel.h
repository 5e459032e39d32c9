// A handful of threads for work that waits for disks or runs over bytes (checksums, copies). Not
// for tensor maths: compute threads are OpenMP's. The tasks call no torch operator.
#pragma once

#include <cstddef>
#include <functional>

namespace longhaul {

// Calls task(0) .. task(count - 1), each once, in no order, on at most `max_threads` threads
// (0: as many as there are cores), which are quiet where the caller is (quiet.h). Returns when all
// are done; then throws the exception of the lowest index, if any.
void parallel_tasks(size_t count, const std::function<void(size_t)>& task, size_t max_threads = 0);

}  // namespace longhaul
