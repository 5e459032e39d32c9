// The loss over all visible keys, block by block of queries: the head sum of a block, the reduction
// over ranks, the block's loss and gradients.
#include <ATen/ATen.h>

#include "longhaul/ops/common.h"
#include "longhaul/ops/flash_attention/operands.h"
#include "longhaul/ops/indexer_kl_loss/kl_gradients.h"

namespace longhaul::ops {
namespace {

// Adds up the loss and the gradients of the blocks in the reference.
class ReferenceLoss {
 public:
  ReferenceLoss(const IndexerInputs& in, const Tensor& doc_start, bool with_grads)
      : in_(in), doc_start_BS_(doc_start), with_grads_(with_grads) {
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
        visible_mask(doc_start_BS_, at).unsqueeze(0), with_grads_);
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
  Tensor doc_start_BS_;
  bool with_grads_;
  Tensor loss_, d_query_, d_key_, d_weights_;
};

// The same with the CPU kernel.
class FusedLoss {
 public:
  FusedLoss(const IndexerInputs& in, const Tensor& doc_start, bool with_grads)
      : in_(in),
        doc_start_BS_(doc_start),
        query_BSHD_(pad_last(in.query_BSHD, kKernelColumns)),
        key_BSD_(pad_last(in.key_BSD, kKernelColumns)),
        weights_BSH_(in.weights_BSH.to(at::kFloat).contiguous()) {
    const auto fp32 = query_BSHD_.options().dtype(at::kFloat);
    loss_BS_ = at::zeros(doc_start.sizes(), fp32);
    if (!with_grads) return;
    d_query_ = at::zeros(query_BSHD_.sizes(), query_BSHD_.options());
    d_weights_ = at::zeros(weights_BSH_.sizes(), fp32);
    d_key_ = at::zeros(key_BSD_.sizes(), fp32);
  }

  void add(const QueryBlock& at, const Tensor& head_sum) {
    const auto queries = [&](const Tensor& x) { return x[at.row].narrow(0, at.query, at.queries); };
    const auto keys = [&](const Tensor& x) { return x[at.row].narrow(0, at.key, at.keys); };
    const bool with_grads = d_query_.defined();
    const Tensor query = queries(query_BSHD_), sum = head_sum.contiguous();
    const BlockKeys visible(doc_start_BS_, at);
    memory_.run("dense_indexer_kl_loss", longhaul_dense_indexer_kl_loss,
                longhaul_dense_indexer_kl_loss_workspace,
                longhaul_dense_indexer_kl_loss_args{
                    .dtype = kernel_dtype(query),
                    .S = at.queries,
                    .L = at.keys,
                    .H = query.size(1),
                    .D = query.size(2),
                    .query = query.const_data_ptr(),
                    .key = keys(key_BSD_).const_data_ptr(),
                    .weights = queries(weights_BSH_).const_data_ptr<float>(),
                    .first_key = visible.first.const_data_ptr<int64_t>(),
                    .last_key = visible.last.const_data_ptr<int64_t>(),
                    .head_sum = sum.const_data_ptr<float>(),
                    .loss = queries(loss_BS_).data_ptr<float>(),
                    .d_query = with_grads ? queries(d_query_).data_ptr() : nullptr,
                    .d_key = with_grads ? keys(d_key_).data_ptr<float>() : nullptr,
                    .d_weights = with_grads ? queries(d_weights_).data_ptr<float>() : nullptr});
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
  Tensor doc_start_BS_, query_BSHD_, key_BSD_, weights_BSH_;
  Tensor loss_BS_, d_query_, d_key_, d_weights_;
  KernelMemory memory_;
};

template <typename Loss>
KlGradients add_blocks(Loss loss, const HeadSums& sums, const Tensor& doc_start,
                       const std::function<void(Tensor&)>& all_reduce) {
  for (const QueryBlock& block : query_blocks(doc_start)) {
    Tensor head_sum = sums.of(block);
    if (all_reduce) all_reduce(head_sum);
    loss.add(block, head_sum);
  }
  return loss.result();
}

AttentionState detached(const AttentionState& a) {
  return {.query_BSHD = a.query_BSHD.detach(),
          .key = a.key.detach(),
          .softmax_max = a.softmax_max.detach(),
          .softmax_sum = a.softmax_sum.detach(),
          .scale = a.scale};
}

Kernel usable(Kernel wanted, const IndexerInputs& in, const AttentionState& attention) {
  if (wanted == Kernel::kReference || in.query_BSHD.is_meta()) return Kernel::kReference;
  std::string reason = why_no_fused_loss(in);
  if (reason.empty()) reason = why_no_fused_attention(attention.query_BSHD, attention.key, {});
  if (reason.empty()) return Kernel::kFused;
  report_fallback("indexer_kl_loss", reason);
  return Kernel::kReference;
}

}  // namespace

Tensor dense_indexer_kl_loss(const IndexerInputs& indexer, const AttentionState& attention,
                             const Tensor& doc_start_BS, const DenseLossOptions& options) {
  check_indexer_inputs(indexer);
  const int64_t B = indexer.query_BSHD.size(0), S = indexer.query_BSHD.size(1);
  check_shape(indexer.key_BSD, {B, S, kAnySize}, "indexer key");
  check_shape(doc_start_BS, {B, S}, "indexer loss: doc_start");
  check_dims(attention.query_BSHD, 4, "attention query");
  const Kernel kernel = usable(options.kernel, indexer, attention);
  const HeadSums sums(detached(attention), doc_start_BS, kernel);
  return loss_with_gradients(indexer, [&](bool with_grads) {
    if (kernel == Kernel::kFused) {
      return add_blocks(FusedLoss(indexer, doc_start_BS, with_grads), sums, doc_start_BS,
                        options.all_reduce);
    }
    return add_blocks(ReferenceLoss(indexer, doc_start_BS, with_grads), sums, doc_start_BS,
                      options.all_reduce);
  });
}

}  // namespace longhaul::ops
