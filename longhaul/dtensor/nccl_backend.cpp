#include "longhaul/dtensor/nccl_backend.h"

#include "longhaul/base/error.h"

#ifdef LONGHAUL_HAS_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#else
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#endif

namespace longhaul::dtensor {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend([[maybe_unused]] const NcclGroup& group) {
#ifdef LONGHAUL_HAS_NCCL
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = group.timeout;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(group.store, group.rank, group.size,
                                                     std::move(options));
#else
  throw Error(
      "ranks on CUDA devices talk through NCCL, and this program was built without it (see "
      "`longhaul version`)");
#endif
}

}  // namespace longhaul::dtensor
