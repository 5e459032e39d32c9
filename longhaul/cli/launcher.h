// Starts the ranks of a job as processes of this machine and ends them together.
#pragma once

#include <string>
#include <vector>

namespace longhaul::cli {

// Starts `ranks` processes of this program with the arguments `words` (without the program's name),
// each told its rank in the environment as torchrun does it, and the machine's cores shared out
// among them (OMP_NUM_THREADS, unless it is set). Rank 0 has this process's terminal; what others
// say on stderr is shown with their rank. SIGINT, SIGTERM and SIGUSR1 go on to all of them.
// Returns when all have ended well. When one fails, the others are asked to end, killed if they do
// not within 20 seconds or at another signal, and UserError or Error names the rank that ended first
// and gives its last words (those of rank 0 stand above).
void launch_ranks(int ranks, const std::vector<std::string>& words);

}  // namespace longhaul::cli
