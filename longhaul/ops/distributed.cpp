#include "longhaul/ops/distributed.h"

#include <torch/library.h>

namespace longhaul::ops {

c10::OperatorHandle distributed_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      (std::string("longhaul_model::") + name).c_str(), "");
}

TORCH_LIBRARY(longhaul_model, m) {
  // Below autograd (ops/matmul differentiates): their rules stand in dtensor/rules.
  m.def("linear(Tensor x, Tensor weight) -> Tensor");
  m.def("linear_grad(Tensor dy, Tensor x, Tensor weight, bool[2] wanted) -> (Tensor, Tensor)");
  m.def("embedding(Tensor weight, Tensor ids) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, int kernel) -> Tensor");
  m.def(
      "rms_norm_add(Tensor x, Tensor residual, Tensor weight, float eps, int kernel) -> (Tensor, "
      "Tensor)");
  m.def("rotary_mul(Tensor x, Tensor cos, Tensor sin, int mode, int kernel) -> Tensor");
  m.def("swiglu(Tensor gate, Tensor up, int kernel) -> Tensor");
  m.def("linear_by_head(Tensor x, Tensor weight) -> Tensor");
  m.def("linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, int kernel) -> Tensor");
  // With a value the keys and values are each head's own; value_dim, the head sum and the
  // statistics as in AttentionOptions.
  m.def(
      "flash_attention(Tensor query, Tensor key, Tensor? value, Tensor doc_start, Tensor? "
      "last_key, "
      "float scale, int value_dim, bool head_sum, bool statistics, int kernel) -> (Tensor, Tensor, "
      "Tensor, Tensor)");
  m.def(
      "sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor indices, Tensor? "
      "last_key, "
      "float scale, int value_dim, bool head_sum, bool statistics, int kernel) -> (Tensor, Tensor, "
      "Tensor, Tensor)");
  m.def(
      "lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor doc_start, Tensor? "
      "last_key, int "
      "topk, int kernel) -> (Tensor, Tensor)");
  m.def(
      "sparse_indexer_kl_loss(Tensor query, Tensor key, Tensor weights, Tensor indices, Tensor "
      "head_sum, Tensor? scores, int kernel) -> Tensor");
  m.def(
      "dense_indexer_kl_loss(Tensor query, Tensor key, Tensor weights, Tensor attention_query, "
      "Tensor attention_key, Tensor softmax_max, Tensor softmax_sum, float scale, Tensor "
      "doc_start, Tensor? last_key, int kernel) -> Tensor");
}

}  // namespace longhaul::ops
