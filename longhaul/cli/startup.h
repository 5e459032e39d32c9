// What must happen before anything else in the process. Called by main() only.
#pragma once

namespace longhaul::cli {

// Two settings are read when libraries are loaded, so setting them here would be too late; where
// one is missing the program sets it and starts itself again. Commands that compute nothing are
// spared the second start; where it is not possible the program goes on as it is.
//   OMP_WAIT_POLICY=passive: idle threads do not spin against the I/O threads or other processes.
//   MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_: memory that was freed stays mapped. By default
//   glibc returns every large tensor to the kernel, and page faults then take half of a training
//   step. The cost: the process keeps its peak.
void restart_with_process_policy(char** argv);

}  // namespace longhaul::cli
