// The loss over all visible keys, block by block of queries: the head sum of a block, where heads
// lie on several ranks the sum over these, the block's loss and gradients.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/distributed.h"
#include "longhaul/ops/flash_attention/operands.h"
#include "longhaul/ops/indexer_kl_loss/kl_gradients.h"

namespace longhaul::ops {
namespace {

// Adds up the loss and the gradients of the blocks in the reference.
class ReferenceLoss {
 public:
  ReferenceLoss(const IndexerInputs& in, const KeyRange& range, bool with_grads)
      : in_(in), range_(range), with_grads_(with_grads) {
    const auto wide = in.query_BSHD.options().dtype(wide_type(in.query_BSHD));
    loss_ = at::zeros({}, wide);
    if (!with_grads) return;
    d_query_ = at::zeros_like(in.query_BSHD);
    d_weights_ = at::zeros_like(in.weights_BSH);
    d_key_ = at::zeros(in.key_BSD.sizes(), wide);
  }

  void add(const QueryBlock& at, const Tensor& head_sum) {
    const auto queries = [&](const Tensor& x) {
      return x.narrow(0, at.row, 1).narrow(1, at.query, at.queries);
    };
    const auto keys = [&](const Tensor& x) {
      return x.narrow(0, at.row, 1).narrow(1, at.key, at.keys);
    };
    const Tensor of_queries = head_sum.narrow(1, 0, at.queries).t().unsqueeze(0);
    const KlBlock block = dense_kl_of_block_reference(
        {queries(in_.query_BSHD), keys(in_.key_BSD), queries(in_.weights_BSH)}, of_queries,
        visible_mask(range_, at).unsqueeze(0), with_grads_);
    loss_.add_(block.gradients.loss);
    if (!with_grads_) return;
    queries(d_query_).copy_(block.gradients.grads.query_BSHD);
    queries(d_weights_).copy_(block.gradients.grads.weights_BSH);
    keys(d_key_).add_(block.d_key);
  }

  KlGradients result() const {
    if (!with_grads_) return {loss_, {}};
    return {loss_, {d_query_, d_key_.to(in_.key_BSD.scalar_type()), d_weights_}};
  }

 private:
  const IndexerInputs& in_;
  KeyRange range_;
  bool with_grads_;
  Tensor loss_, d_query_, d_key_, d_weights_;
};

// What the CPU kernel reads of a block, padded.
class KernelOperands {
 public:
  KernelOperands(const IndexerInputs& in, const KeyRange& range)
      : query_BSHD(pad_last(in.query_BSHD, kKernelColumns)),
        key_BSD(pad_last(in.key_BSD, kKernelColumns)),
        weights_BSH(in.weights_BSH.to(at::kFloat).contiguous()),
        range_(range.first_BS, range.last()) {}

  // Of a block's queries, and of its keys.
  Tensor queries(const Tensor& x, const QueryBlock& at) const {
    return x[at.row].narrow(0, at.query, at.queries);
  }
  Tensor keys(const Tensor& x, const QueryBlock& at) const {
    return x[at.row].narrow(0, at.key, at.keys);
  }

  // run(args) with all that is read but the head sum.
  template <typename F>
  void with_args(const QueryBlock& at, const F& run) const {
    const BlockKeys visible(range_, at);
    const Tensor query = queries(query_BSHD, at);
    run(longhaul_dense_indexer_kl_loss_args{
        .dtype = kernel_dtype(query),
        .S = at.queries,
        .L = at.keys,
        .H = query.size(1),
        .D = query.size(2),
        .query = query.const_data_ptr(),
        .key = keys(key_BSD, at).const_data_ptr(),
        .weights = queries(weights_BSH, at).const_data_ptr<float>(),
        .first_key = visible.first.const_data_ptr<int64_t>(),
        .last_key = visible.last.const_data_ptr<int64_t>(),
        .head_sum = nullptr,
        .softmax_max = nullptr,
        .softmax_sum = nullptr,
        .loss = nullptr,
        .d_query = nullptr,
        .d_key = nullptr,
        .d_weights = nullptr});
  }

  const Tensor query_BSHD, key_BSD, weights_BSH;

 private:
  KeyRange range_;
};

// The same with the CPU kernel.
class FusedLoss {
 public:
  FusedLoss(const IndexerInputs& in, const KeyRange& range, const IndexerSoftmax& softmax,
            bool with_grads)
      : in_(in), operands_(in, range) {
    if (softmax.max_BS.defined()) {
      softmax_ = {softmax.max_BS.to(at::kFloat).contiguous(),
                  softmax.sum_BS.to(at::kFloat).contiguous()};
    }
    const auto fp32 = in.query_BSHD.options().dtype(at::kFloat);
    loss_BS_ = at::zeros({in.query_BSHD.size(0), in.query_BSHD.size(1)}, fp32);
    if (!with_grads) return;
    d_query_ = at::zeros(operands_.query_BSHD.sizes(), operands_.query_BSHD.options());
    d_weights_ = at::zeros(in.weights_BSH.sizes(), fp32);
    d_key_ = at::zeros(operands_.key_BSD.sizes(), fp32);
  }

  void add(const QueryBlock& at, const Tensor& head_sum) {
    const Tensor sum = head_sum.to(at::kFloat).contiguous();
    const auto of_queries = [&](const Tensor& x) {
      return x.defined() ? operands_.queries(x, at).data_ptr<float>() : nullptr;
    };
    operands_.with_args(at, [&](longhaul_dense_indexer_kl_loss_args args) {
      args.head_sum = sum.const_data_ptr<float>();
      args.softmax_max = of_queries(softmax_.max_BS);
      args.softmax_sum = of_queries(softmax_.sum_BS);
      args.loss = of_queries(loss_BS_);
      if (d_query_.defined()) {
        args.d_query = operands_.queries(d_query_, at).data_ptr();
        args.d_key = operands_.keys(d_key_, at).data_ptr<float>();
        args.d_weights = of_queries(d_weights_);
      }
      memory_.run("dense_indexer_kl_loss", longhaul_dense_indexer_kl_loss,
                  longhaul_dense_indexer_kl_loss_workspace, args);
    });
  }

  KlGradients result() const {
    if (!d_query_.defined()) return {loss_BS_.sum(), {}};
    const int64_t D = in_.query_BSHD.size(3);
    return {loss_BS_.sum(),
            {d_query_.narrow(-1, 0, D).contiguous(),
             d_key_.narrow(-1, 0, D).to(in_.key_BSD.scalar_type()),
             d_weights_.to(in_.weights_BSH.scalar_type())}};
  }

 private:
  const IndexerInputs& in_;
  KernelOperands operands_;
  IndexerSoftmax softmax_;
  Tensor loss_BS_, d_query_, d_key_, d_weights_;
  KernelMemory memory_;
};

using HeadSumOf = std::function<Tensor(const QueryBlock&)>;

template <typename Loss>
KlGradients add_blocks(Loss loss, const std::vector<QueryBlock>& blocks,
                       const HeadSumOf& head_sum_of) {
  for (const QueryBlock& block : blocks) loss.add(block, head_sum_of(block));
  return loss.result();
}

KlGradients compute(const IndexerInputs& in, const KeyRange& range, const HeadSumOf& head_sum_of,
                    const DenseGradientsOptions& options, bool with_grads) {
  const auto blocks = query_blocks(range, in.key_BSD.size(1));
  if (options.kernel == Kernel::kFused) {
    return add_blocks(FusedLoss(in, range, options.softmax, with_grads), blocks, head_sum_of);
  }
  return add_blocks(ReferenceLoss(in, range, with_grads), blocks, head_sum_of);
}

// The head sums of a slice of the queries, over all ranks' heads. In each round the ranks make a
// block of each slice, so that they are busy with the losses of their own at the same time.
class SharedHeadSums {
 public:
  SharedHeadSums(const HeadSums& own_heads, const HeadShards& shards)
      : own_heads_(own_heads), shards_(shards) {
    const int64_t num_keys = own_heads.attention().key.size(1);
    for (const auto& slice : shards.slices) {
      blocks_.push_back(
          query_blocks(own_heads.range().of_queries(slice.first, slice.count), num_keys));
      for (QueryBlock& block : blocks_.back()) block.query += slice.first;
      rounds_ = std::max(rounds_, blocks_.back().size());
    }
  }

  // Of the next block of this rank's slice.
  Tensor next() {
    const QueryBlock& own = blocks_[shards_.rank][round_];
    return add_up().narrow(0, 0, own.keys).narrow(1, 0, round_up(own.queries, kHeadSumGroup));
  }
  // The rounds for which only other slices have blocks.
  void finish() {
    while (round_ < rounds_) add_up();
  }

 private:
  Tensor add_up() {
    std::vector<Tensor> sums(blocks_.size());
    int64_t keys = 0, queries = 0;
    for (size_t rank = 0; rank < sums.size(); ++rank) {
      if (round_ >= blocks_[rank].size()) continue;
      sums[rank] = own_heads_.of(blocks_[rank][round_]);
      keys = std::max(keys, sums[rank].size(0));
      queries = std::max(queries, sums[rank].size(1));
    }
    const auto& attention = own_heads_.attention();
    const Tensor terms =
        at::zeros({static_cast<int64_t>(sums.size()), keys, queries},
                  attention.query_BSHD.options().dtype(wide_type(attention.query_BSHD)));
    for (size_t rank = 0; rank < sums.size(); ++rank) {
      if (!sums[rank].defined()) continue;
      terms[static_cast<int64_t>(rank)]
          .narrow(0, 0, sums[rank].size(0))
          .narrow(1, 0, sums[rank].size(1))
          .copy_(sums[rank]);
    }
    ++round_;
    return shards_.reduce_scatter(terms);
  }

  const HeadSums& own_heads_;
  const HeadShards& shards_;
  std::vector<std::vector<QueryBlock>> blocks_;  // by rank, of the attention's queries
  size_t round_ = 0, rounds_ = 0;
};

KeyRange own_queries(const KeyRange& range, const HeadShards& shards) {
  const auto& [first, count] = shards.slices.at(shards.rank);
  return range.of_queries(first, count);
}

KlGradients compute_own_slice(const IndexerInputs& in, const HeadSums& own_heads,
                              const HeadShards& shards, Kernel kernel, bool with_grads) {
  SharedHeadSums sums(own_heads, shards);
  const auto result = compute(
      in, own_queries(own_heads.range(), shards), [&](const QueryBlock&) { return sums.next(); },
      {.kernel = kernel, .softmax = {}}, with_grads);
  sums.finish();
  return result;
}

IndexerSoftmax softmax_reference(const IndexerInputs& in, const KeyRange& range) {
  const auto wide = in.query_BSHD.options().dtype(wide_type(in.query_BSHD));
  const IndexerSoftmax softmax = {at::zeros(range.first_BS.sizes(), wide),
                                  at::zeros(range.first_BS.sizes(), wide)};
  for (const QueryBlock& at : query_blocks(range, in.key_BSD.size(1))) {
    const auto queries = [&](const Tensor& x) {
      return x.narrow(0, at.row, 1).narrow(1, at.query, at.queries);
    };
    const Tensor mask = visible_mask(range, at), some = mask.any(-1);
    const Tensor scores =
        indexer_scores(queries(in.query_BSHD),
                       in.key_BSD.narrow(0, at.row, 1).narrow(1, at.key, at.keys),
                       queries(in.weights_BSH))[0]
            .masked_fill(mask.logical_not(), -std::numeric_limits<double>::infinity());
    const Tensor max = scores.amax(-1).masked_fill(some.logical_not(), 0);
    queries(softmax.max_BS).copy_(max);
    queries(softmax.sum_BS).copy_((scores - max.unsqueeze(-1)).exp().sum(-1));
  }
  return softmax;
}

IndexerSoftmax softmax_fused(const IndexerInputs& in, const KeyRange& range) {
  const auto fp32 = in.query_BSHD.options().dtype(at::kFloat);
  const IndexerSoftmax softmax = {at::zeros(range.first_BS.sizes(), fp32),
                                  at::zeros(range.first_BS.sizes(), fp32)};
  const KernelOperands operands(in, range);
  KernelMemory memory;
  for (const QueryBlock& at : query_blocks(range, in.key_BSD.size(1))) {
    operands.with_args(at, [&](longhaul_dense_indexer_kl_loss_args args) {
      args.softmax_max = operands.queries(softmax.max_BS, at).data_ptr<float>();
      args.softmax_sum = operands.queries(softmax.sum_BS, at).data_ptr<float>();
      memory.run("dense_indexer_softmax", longhaul_dense_indexer_softmax,
                 longhaul_dense_indexer_softmax_workspace, args);
    });
  }
  return softmax;
}

AttentionState detached(const AttentionState& a) {
  return {.query_BSHD = a.query_BSHD.detach(),
          .key = a.key.detach(),
          .softmax_max = a.softmax_max.detach(),
          .softmax_sum = a.softmax_sum.detach(),
          .scale = a.scale};
}

// The wanted kernel, or the reference where `reason` says why not.
Kernel usable(Kernel wanted, const IndexerInputs& in, const std::string& reason) {
  if (wanted == Kernel::kReference || in.query_BSHD.is_meta()) return Kernel::kReference;
  if (reason.empty()) return Kernel::kFused;
  report_fallback("indexer_kl_loss", reason);
  return Kernel::kReference;
}

std::string why_not_fused(const IndexerInputs& in, const AttentionState& attention) {
  const std::string reason = why_no_fused_indexer_grad(in);
  if (!reason.empty()) return reason;
  return why_no_fused_attention(attention.query_BSHD);
}

// Throws Error unless the indexer's queries, its keys and what they see fit.
void check_dense(const IndexerInputs& in, const KeyRange& range) {
  check_indexer_inputs(in);
  check_key_range(range, in.query_BSHD.sizes().slice(0, 2), in.key_BSD.size(1),
                  "indexer loss: doc_start");
}

}  // namespace

Tensor dense_indexer_kl_loss(const IndexerInputs& indexer, const AttentionState& attention,
                             const KeyRange& range, const DenseLossOptions& options) {
  if (is_distributed_tensor(indexer.query_BSHD)) {
    using Signature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Tensor&, const Tensor&, const Tensor&, double, const Tensor&,
                             const std::optional<Tensor>&, int64_t);
    return distributed<Signature>("dense_indexer_kl_loss")
        .call(indexer.query_BSHD, indexer.key_BSD, indexer.weights_BSH, attention.query_BSHD,
              attention.key, attention.softmax_max, attention.softmax_sum, attention.scale,
              range.first_BS, given(range.last_BS), static_cast<int64_t>(options.kernel));
  }
  const auto& shards = options.shards;
  check_dense(indexer, shards ? own_queries(range, *shards) : range);
  const Kernel kernel = usable(options.kernel, indexer, why_not_fused(indexer, attention));
  const HeadSums sums(detached(attention), range, kernel);
  if (shards) {
    return loss_with_gradients(indexer, [&](bool with_grads) {
      return compute_own_slice(indexer, sums, *shards, kernel, with_grads);
    });
  }
  return loss_with_gradients(indexer, [&](bool with_grads) {
    return compute(
        indexer, range, [&](const QueryBlock& block) { return sums.of(block); },
        {.kernel = kernel, .softmax = {}}, with_grads);
  });
}

KlGradients dense_indexer_kl_gradients(const IndexerInputs& indexer, const KeyRange& range,
                                       const HeadSumOf& head_sum_of,
                                       const DenseGradientsOptions& options) {
  const at::NoGradGuard no_grad;
  check_dense(indexer, range);
  if (options.softmax.max_BS.defined()) {
    const at::IntArrayRef queries = indexer.query_BSHD.sizes().slice(0, 2);
    check_shape(options.softmax.max_BS, queries, "indexer loss: softmax_max_index");
    check_shape(options.softmax.sum_BS, queries, "indexer loss: softmax_sum_index");
  }
  auto usable_options = options;
  usable_options.kernel = usable(options.kernel, indexer, why_no_fused_indexer_grad(indexer));
  return compute(indexer, range, head_sum_of, usable_options, /*with_grads=*/true);
}

IndexerSoftmax dense_indexer_softmax(const IndexerInputs& indexer, const KeyRange& range,
                                     Kernel kernel) {
  const at::NoGradGuard no_grad;
  check_dense(indexer, range);
  if (usable(kernel, indexer, why_no_fused_indexer_grad(indexer)) == Kernel::kFused) {
    return softmax_fused(indexer, range);
  }
  return softmax_reference(indexer, range);
}

}  // namespace longhaul::ops
