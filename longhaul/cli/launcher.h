// Starts the ranks of a job as processes of this machine and ends them together.
#pragma once

#include <string>
#include <vector>

namespace longhaul::cli {

// Starts `ranks` processes of this program with the arguments `words` (without the program's name),
// each told its rank in the environment as torchrun does it, and the machine's cores shared out
// among them (OMP_NUM_THREADS, unless it is set). Rank 0 has this process's terminal; what others
// say on stderr is shown with their rank. SIGINT, SIGTERM and SIGUSR1 go on to all of them.
// Returns when all have ended well. When one fails, the others are asked to end, and killed if they
// do not within 10 seconds or at another signal. UserError or Error names the rank that failed
// first and gives its words: one that was killed or failed by itself before one that only waited
// for it in vain, and ranks that hang where all others did.
void launch_ranks(int ranks, const std::vector<std::string>& words);

}  // namespace longhaul::cli
