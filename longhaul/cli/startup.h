// What must happen before anything else in the process. Called by main() only.
#pragma once

namespace longhaul::cli {

// libgomp reads its environment when it is loaded, so setting it here would be too late: without an
// OMP_WAIT_POLICY the program starts itself again with "passive", which keeps idle threads from
// spinning against the I/O threads. Commands that compute nothing are spared the second start;
// where it is not possible the program goes on as it is.
void restart_with_passive_openmp(char** argv);

}  // namespace longhaul::cli
