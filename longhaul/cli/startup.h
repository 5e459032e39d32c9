// What must happen before anything else in the process. Called by main() only.
#pragma once

namespace longhaul::cli {

// Some settings are read when libraries are loaded, so setting them here would be too late; where
// one is missing the program sets it and starts itself again. Commands that compute nothing are
// spared the second start; where it is not possible the program goes on as it is.
//   OMP_WAIT_POLICY=passive, GOMP_SPINCOUNT=3000: idle threads spin for a fraction of a millisecond
//   and then sleep, so that they do not work against the I/O threads or other processes. Without
//   any spinning a training step of the 50M model took 1.14 times as long (two cores of a virtual
//   machine, 1,024 tokens); with it, beside another busy process, 1.1 times as long.
//   MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_: memory that was freed stays mapped. By default
//   glibc returns every large tensor to the kernel, and page faults then take half of a training
//   step. The cost: the process keeps its peak.
//   GLIBC_TUNABLES=glibc.malloc.hugetlb=1: that memory comes in pages of 2 MiB, where the kernel
//   has them, so that the first steps fault a tenth as often. No cost was measured.
void restart_with_process_policy(char** argv);

}  // namespace longhaul::cli
