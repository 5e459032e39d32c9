// Attention and the indexer. Heads are cut where the queries' heads are: a key that all heads share
// is then needed whole, and head sums are terms. Queries are cut where they lie in slices of the
// sequence: each slice sees the whole keys, from its own place in the sequence on.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "longhaul/dtensor/operators/placing.h"
#include "longhaul/ops/flash_attention/flash_attention.h"
#include "longhaul/ops/indexer_kl_loss/indexer_kl_loss.h"
#include "longhaul/ops/lightning_indexer/lightning_indexer.h"
#include "longhaul/ops/matmul/matmul.h"
#include "longhaul/ops/sparse_flash_attention/sparse_flash_attention.h"

namespace longhaul::dtensor {
namespace {

constexpr int64_t kBatch = 0, kSequence = 1, kHeads = 2;

Placement cut(int64_t dim) { return Placement::shard(dim); }
Placement whole() { return Placement::replicate(); }
Placement term() { return Placement::partial(); }

using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

struct Asked {
  const char* op;
  double scale;
  int64_t value_dim;
  bool head_sum, statistics;
  int64_t kernel;

  ops::AttentionOptions options() const {
    return {.scale = scale,
            .value_dim = value_dim,
            .return_head_sum = head_sum,
            .return_statistics = statistics,
            .kernel = kernel_of(kernel)};
  }
};

// Where the queries are computed along an axis: where they lie or, where that is no way to deal
// them out, where the keys' heads are.
Placement place_of_queries(const Tensor& query, const Tensor& key, size_t axis) {
  const Placement now = placement_of(query, axis), of_key = placement_of(key, axis);
  if (now.is_shard() && now.dim() <= kHeads) return now;
  return key.dim() == 4 && of_key.is_shard(kHeads) ? of_key : now;
}

// query, key, value, and two tensors [B, S, ...] that say what each query sees.
template <typename F>
Results attend(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& sees,
               const Tensor& last, const Asked& asked, int64_t head_sum_keys, const F& f) {
  const int64_t B = query.size(0), S = query.size(1), H = query.size(2);
  const int64_t V = value.defined() ? value.size(-1) : asked.value_dim;
  Placing placing(asked.op, mesh_of({&query, &key}), {query, key, value, sees, last},
                  {{B, S, H, V}, {B, S, H}, {B, S, H}, {B, S, head_sum_keys}});
  const Placement of_head = key.dim() == 4 ? cut(kHeads) : whole();
  for (size_t axis = 0; axis < placing.num_axes(); ++axis) {
    const Placement now = place_of_queries(query, key, axis);
    if (now.is_shard(kHeads)) {
      placing.share({now, of_head, of_head, whole(), whole()}, {now, now, now, term()});
    } else if (now.is_shard(kSequence)) {
      placing.share({now, whole(), whole(), now, now}, {now, now, now, now});
    } else if (now.is_shard(kBatch)) {
      placing.share({now, now, now, now, now}, {now, now, now, now});
    } else {
      placing.replicate();
    }
  }
  const auto results = placing.compute([&](const std::vector<Tensor>& parts) {
    const ops::AttentionResult result = f(parts);
    return std::vector{result.out_BSHV, result.softmax_max, result.softmax_sum, result.head_sum};
  });
  return {results[0], results[1], results[2], results[3]};
}

// Each query's own index: what a slice of the queries must say of itself.
Tensor last_keys(const Tensor& doc_start, const std::optional<Tensor>& last_key) {
  if (last_key) return *last_key;
  const auto options = at::TensorOptions(at::kLong).device(doc_start.device());
  return at::arange(doc_start.size(1), options).expand(doc_start.sizes()).contiguous();
}

Tensor as_tensor(const std::optional<Tensor>& x) { return x.value_or(Tensor()); }

Results flash_attention(const Tensor& query, const Tensor& key, const std::optional<Tensor>& value,
                        const Tensor& doc_start, const std::optional<Tensor>& last_key,
                        double scale, int64_t value_dim, bool head_sum, bool statistics,
                        int64_t kernel) {
  const Asked asked{"flash_attention", scale, value_dim, head_sum, statistics, kernel};
  return attend(query, key, as_tensor(value), doc_start, last_keys(doc_start, last_key), asked,
                key.size(1), [&](const std::vector<Tensor>& x) {
                  const bool all = x[0].size(1) == x[1].size(1) && !last_key;
                  return ops::flash_attention(x[0], x[1], x[2],
                                              all ? ops::KeyRange(x[3]) : ops::KeyRange(x[3], x[4]),
                                              asked.options());
                });
}

Results sparse_flash_attention(const Tensor& query, const Tensor& key,
                               const std::optional<Tensor>& value, const Tensor& indices,
                               const std::optional<Tensor>& /*last_key*/, double scale,
                               int64_t value_dim, bool head_sum, bool statistics, int64_t kernel) {
  const Asked asked{"sparse_flash_attention", scale, value_dim, head_sum, statistics, kernel};
  return attend(query, key, as_tensor(value), indices, Tensor(), asked, indices.size(2),
                [&](const std::vector<Tensor>& x) {
                  return ops::sparse_flash_attention(x[0], x[1], x[2], x[3], asked.options());
                });
}

// Each rank scores the slice of the queries that it has; of queries that all ranks have, a slice of
// its own, so that nothing is computed twice.
std::tuple<Tensor, Tensor> lightning_indexer(const Tensor& query, const Tensor& key,
                                             const Tensor& weights, const Tensor& doc_start,
                                             const std::optional<Tensor>& last_key, int64_t topk,
                                             int64_t kernel) {
  const int64_t B = query.size(0), S = query.size(1), K = std::min(topk, key.size(1));
  Placing placing("lightning_indexer", mesh_of({&query, &key, &weights}),
                  {query, key, weights, doc_start, last_keys(doc_start, last_key)},
                  {{B, S, K}, {B, S, K}});
  for (size_t axis = 0; axis < placing.num_axes(); ++axis) {
    if (placement_of(query, axis).is_shard(kBatch)) {
      const Placement rows = cut(kBatch);
      placing.share({rows, rows, rows, rows, rows}, {rows, rows});
    } else {
      const Placement slice = cut(kSequence);
      placing.share({slice, whole(), slice, slice, slice}, {slice, slice});
    }
  }
  const auto results = placing.compute([&](const std::vector<Tensor>& x) {
    const auto selection = ops::lightning_indexer(x[0], x[1], x[2], ops::KeyRange(x[3], x[4]), topk,
                                                  kernel_of(kernel));
    return std::vector{selection.indices_BSK, selection.scores_BSK};
  });
  return {results[0], results[1]};
}

Tensor sparse_indexer_kl_loss(const Tensor& query, const Tensor& key, const Tensor& weights,
                              const Tensor& indices, const Tensor& head_sum,
                              const std::optional<Tensor>& scores, int64_t kernel) {
  Placing placing("sparse_indexer_kl_loss", mesh_of({&query, &key, &weights}),
                  {query, key, weights, indices, head_sum, as_tensor(scores)}, {{}});
  for (size_t axis = 0; axis < placing.num_axes(); ++axis) {
    const bool rows = placement_of(query, axis).is_shard(kBatch);
    const Placement slice = cut(rows ? kBatch : kSequence);
    placing.share({slice, rows ? slice : whole(), slice, slice, slice, slice}, {term()});
  }
  return placing.compute([&](const std::vector<Tensor>& x) {
    return std::vector{
        ops::sparse_indexer_kl_loss({x[0], x[1], x[2]}, x[3], x[4], kernel_of(kernel), x[5])};
  })[0];
}

using Axes = std::vector<const Communicator*>;

// How the queries fall to the ranks of the axes, of which the first cuts the whole.
ops::HeadShards head_shards(const Axes& axes, int64_t num_queries) {
  ops::HeadShards shards = {
      .slices = {{0, num_queries}}, .rank = 0, .reduce_scatter = [axes](const Tensor& terms) {
        Tensor sums = terms;
        for (const Communicator* axis : axes) {
          auto sizes = sums.sizes().vec();
          sizes[0] /= axis->size();
          Tensor own = at::empty(sizes, sums.options());
          axis->reduce_scatter(own, sums, Reduction::kSum).wait();
          sums = own;
        }
        return sums[0];
      }};
  for (const Communicator* axis : axes) {
    std::vector<ops::HeadShards::Slice> pieces;
    for (const auto& [first, count] : shards.slices) {
      for (int64_t i = 0; i < axis->size(); ++i) {
        const Slice piece = slice_of(count, axis->size(), i);
        pieces.push_back({first + piece.start, piece.length});
      }
    }
    shards.slices = std::move(pieces);
    shards.rank =
        shards.rank * static_cast<size_t>(axis->size()) + static_cast<size_t>(axis->rank());
  }
  return shards;
}

// Each rank computes the loss of a slice of the queries; where it has some of the heads only, the
// ranks give each other the head sums of their slices.
Tensor dense_indexer_kl_loss(const Tensor& query, const Tensor& key, const Tensor& weights,
                             const Tensor& attention_query, const Tensor& attention_key,
                             const Tensor& softmax_max, const Tensor& softmax_sum, double scale,
                             const Tensor& doc_start, const std::optional<Tensor>& last_key,
                             int64_t kernel) {
  const Mesh& mesh = mesh_of({&query, &attention_query});
  Placing placing("dense_indexer_kl_loss", mesh,
                  {query, key, weights, attention_query, attention_key, softmax_max, softmax_sum,
                   doc_start, last_keys(doc_start, last_key)},
                  {{}});
  Axes head_axes;
  const bool by_head = attention_key.dim() == 4;
  const Placement slice = cut(kSequence);
  for (size_t axis = 0; axis < placing.num_axes(); ++axis) {
    const Placement now = placement_of(attention_query, axis);
    if (now.is_shard(kHeads)) {
      head_axes.push_back(&mesh->axis(static_cast<int>(axis)));
      const Placement keys = by_head ? cut(kHeads) : whole();
      placing.share({slice, whole(), slice, now, keys, now, now, whole(), whole()}, {term()});
    } else if (now.is_shard(kBatch)) {
      placing.share({now, now, now, now, now, now, now, now, now}, {term()});
    } else if (head_axes.empty()) {
      placing.share({slice, whole(), slice, slice, whole(), slice, slice, slice, slice}, {term()});
    } else {
      placing.replicate();  // the slices are those of the axes with heads
    }
  }
  return placing.compute([&](const std::vector<Tensor>& x) {
    ops::DenseLossOptions options{.kernel = kernel_of(kernel)};
    if (!head_axes.empty()) options.shards = head_shards(head_axes, x[3].size(1));
    return std::vector{ops::dense_indexer_kl_loss(
        {x[0], x[1], x[2]},
        {.query_BSHD = x[3], .key = x[4], .softmax_max = x[5], .softmax_sum = x[6], .scale = scale},
        ops::KeyRange(x[7], x[8]), options)};
  })[0];
}

Tensor linear_by_head(const Tensor& x, const Tensor& weight) {
  Placing placing("linear_by_head", mesh_of({&x, &weight}), {x, weight},
                  {{x.size(0), x.size(1), x.size(2), weight.size(2)}});
  for (size_t axis = 0; axis < placing.num_axes(); ++axis) {
    const Placement now = placement_of(x, axis);
    if (now.is_shard(kHeads) || placement_of(weight, axis).is_shard(0)) {
      placing.share({cut(kHeads), cut(0)}, {cut(kHeads)});
    } else if (now.is_shard(kBatch) || now.is_shard(kSequence)) {
      placing.share({now, whole()}, {now});
    } else {
      placing.replicate();
    }
  }
  return placing.compute([](const std::vector<Tensor>& parts) {
    return std::vector{ops::linear_by_head(parts[0], parts[1])};
  })[0];
}

TORCH_LIBRARY_IMPL(longhaul_model, AutogradPrivateUse2, m) {
  m.impl("flash_attention", flash_attention);
  m.impl("sparse_flash_attention", sparse_flash_attention);
  m.impl("lightning_indexer", lightning_indexer);
  m.impl("sparse_indexer_kl_loss", sparse_indexer_kl_loss);
  m.impl("dense_indexer_kl_loss", dense_indexer_kl_loss);
  m.impl("linear_by_head", linear_by_head);
}

}  // namespace
}  // namespace longhaul::dtensor

// What the linker is told to keep.
extern "C" void longhaul_dtensor_attention() {}
