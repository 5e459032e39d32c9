// Starts the ranks of a job as processes of this machine and ends them together.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace longhaul::cli {

struct Launch {
  int ranks = 1;
  std::vector<std::string> words;  // arguments of each, without the program's name
  std::filesystem::path traces;    // where ranks record collectives when one fails; empty: nowhere
};

// Starts processes of this program, each told its rank in the environment as torchrun does it, and
// the machine's cores shared out among them (OMP_NUM_THREADS, unless it is set). Rank 0 has this
// process's terminal; what others say on stderr is shown with their rank. SIGINT, SIGTERM, SIGUSR1
// and SIGUSR2 go on to all of them. Returns when all have ended well. When one fails, the others
// are asked for their traces and to end, and killed if they do not within 10 seconds or at another
// signal. UserError or Error names the rank that failed first and gives its words: one that was
// killed or failed by itself before one that only waited for it in vain, and ranks that hang where
// all others did; and in which collective each rank was.
void launch_ranks(const Launch& launch);

}  // namespace longhaul::cli
