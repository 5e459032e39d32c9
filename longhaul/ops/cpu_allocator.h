// Where libtorch takes the memory of CPU tensors from: malloc, without its memalign. glibc before
// 2.38 cuts an aligned block out of a larger one and cannot join the cuttings again, so that a
// freed tensor's place is too small for the next tensor of the same size: the heap grows step by
// step, and every new page is cleared by the kernel first. A block with room for the alignment
// inside comes back at its full size. Part of the process's policy; see cli/startup.h for the rest.
#pragma once

#include <cstdint>

namespace longhaul::ops {

// Before the first tensor.
void install_cpu_allocator();

// The most that CPU tensors of the process held at once so far, or since the last restart of the
// count; 0 where another allocator is installed.
int64_t most_cpu_tensor_bytes();
// Counts the most anew, from what they hold now.
void restart_most_cpu_tensor_bytes();

}  // namespace longhaul::ops
