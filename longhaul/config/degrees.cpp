#include "longhaul/config/degrees.h"

#include <initializer_list>
#include <limits>

#include "longhaul/base/error.h"

namespace longhaul {
namespace {

// The product, or the largest number where it would not fit; nothing equals or divides that.
int64_t product(std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  for (const int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) {
      return std::numeric_limits<int64_t>::max();
    }
  }
  return result;
}

Degrees degrees_of(const JobConfig& config, int64_t ranks) {
  const auto& p = config.parallelism;
  return {.ranks = ranks,
          .replicate = p.data_parallel_replicate_degree,
          .shard = p.data_parallel_shard_degree,
          .cp = p.context_parallel_degree,
          .tp = p.tensor_parallel_degree,
          .pp = p.pipeline_parallel_degree,
          .efsdp = 1,
          .ep = p.expert_parallel_degree,
          .etp = p.expert_tensor_parallel_degree};
}

// A shard degree of -1 takes the ranks that the others leave over.
void resolve_shard(Degrees& d) {
  const int64_t others = product({d.replicate, d.cp, d.tp, d.pp});
  if (d.shard == -1) {
    if (d.ranks % others != 0) {
      fail_user("{}: the other degrees multiply to {}, which does not divide {}", d.text(), others,
                d.ranks);
    }
    d.shard = d.ranks / others;
  }
  if (const int64_t all = product({d.shard, others}); all != d.ranks) {
    fail_user("{}: the product is {}, not {}", d.text(), all, d.ranks);
  }
}

// Without expert parallelism etp means nothing.
void resolve_experts(Degrees& d) {
  if (d.ep == 1) d.etp = 1;
  if (d.etp != 1 && d.etp != d.tp) {
    fail_user("{}: parallelism.expert_tensor_parallel_degree {} must be 1 or tp {}", d.text(),
              d.etp, d.tp);
  }
  const int64_t sparse = d.shard * d.cp * d.tp;  // at most the ranks
  const int64_t expert_ranks = product({d.ep, d.etp});
  if (sparse % expert_ranks != 0) {
    fail_user("{}: ep {} x etp {} must divide dp_shard x cp x tp = {}", d.text(), d.ep, d.etp,
              sparse);
  }
  d.efsdp = sparse / expert_ranks;
}

void check_batch(const JobConfig& config, const Degrees& d) {
  const int64_t global = config.training.global_batch_size;
  const int64_t step = product({config.training.local_batch_size, d.replicate, d.shard});
  if (global > 0 && global % step != 0) {
    fail_user(
        "{}: training.global_batch_size {} is not a multiple of local_batch_size x dp_replicate x "
        "dp_shard = {}",
        d.text(), global, step);
  }
}

}  // namespace

std::string Degrees::text() const {
  return fmt::format("{} ranks = dp_replicate {} x dp_shard {} x cp {} x tp {} x pp {}", ranks,
                     replicate, shard, cp, tp, pp);
}

Degrees resolve_degrees(const JobConfig& config, int64_t ranks) {
  if (ranks < 1) fail_user("--ranks: {} is out of range, expected >= 1", ranks);
  Degrees degrees = degrees_of(config, ranks);
  resolve_shard(degrees);
  resolve_experts(degrees);
  check_batch(config, degrees);
  return degrees;
}

std::string check_degrees(const JobConfig& config, int64_t ranks) {
  const Degrees d = resolve_degrees(config, ranks);
  if (d.ep == 1) return d.text();
  return fmt::format("{}; experts: dp_shard x cp x tp = {} = efsdp {} x ep {} x etp {}", d.text(),
                     d.shard * d.cp * d.tp, d.efsdp, d.ep, d.etp);
}

}  // namespace longhaul
