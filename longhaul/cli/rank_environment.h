// What whoever started this process says of the ranks of the job: longhaul's own launcher,
// torchrun, SLURM's srun or an MPI launcher.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace longhaul::cli {

// How longhaul's launcher hands rank 0 the socket that the ranks meet at.
inline constexpr const char* kListenSocketVariable = "LONGHAUL_LISTEN_SOCKET";

struct RankEnvironment {
  int rank = 0, size = 1;
  int local_rank = 0;  // among the ranks of this machine
  std::string host;    // where rank 0 listens
  int port = 0;
  std::optional<int> listen_socket;  // of rank 0, where it is listening already
  std::string origin;                // "torchrun's RANK", for messages
};

// Looks a variable up; nullopt where it is not set.
using Variables = std::function<std::optional<std::string>(const std::string& name)>;
Variables process_variables();

// nullopt: this process is alone. In the order RANK and WORLD_SIZE (torchrun), SLURM_PROCID and
// SLURM_STEP_NUM_TASKS, OMPI_COMM_WORLD_*, PMI_*, each with its local rank (0 where it is not
// said). MASTER_ADDR and MASTER_PORT say where rank 0 listens; SLURM's list of nodes and job number
// stand in for them, and so does this machine where all ranks are on it. UserError, naming the
// variables, for numbers that are none, a rank outside of the size, a place that is not said, or a
// socket for rank 0 that does not listen.
std::optional<RankEnvironment> rank_environment(const Variables& variables);

}  // namespace longhaul::cli
