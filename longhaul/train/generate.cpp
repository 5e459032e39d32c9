#include "longhaul/train/generate.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>

#include "longhaul/base/error.h"
#include "longhaul/base/rng.h"

namespace longhaul::train {
namespace {

at::Tensor last_logits(const deepseek_v3::Model& model, const std::vector<int32_t>& context) {
  const auto S = static_cast<int64_t>(context.size());
  const at::Tensor ids = at::tensor(context, at::kInt).to(at::kLong).unsqueeze(0);
  const at::Tensor labels = at::full_like(ids, -100);
  const at::Tensor positions = at::arange(S, at::kLong).unsqueeze(0);
  const auto host = deepseek_v3::prepare_batch(ids, labels, positions, S);
  const auto batch = host.to(model.settings().device);
  deepseek_v3::ForwardContext ctx;
  ctx.pass = deepseek_v3::Pass::kEvaluate;
  ctx.counts.add(host);
  return model.logits(model.forward(batch, ctx)[0][0][S - 1]);
}

// [V], true for ids that must not be drawn; undefined if all may be.
at::Tensor forbidden_ids(int64_t vocab_size, const std::function<bool(int32_t)>& may_draw) {
  if (!may_draw) return {};
  at::Tensor forbidden = at::empty({vocab_size}, at::kBool);
  for (int64_t id = 0; id < vocab_size; ++id) {
    forbidden.data_ptr<bool>()[id] = !may_draw(static_cast<int32_t>(id));
  }
  return forbidden;
}

at::Tensor drawable(const at::Tensor& logits_V, const at::Tensor& forbidden_V) {
  if (!at::isfinite(logits_V).all().item<bool>()) {
    fail_user("the model's output is not finite; take other weights (--checkpoint)");
  }
  if (!forbidden_V.defined()) return logits_V;
  return logits_V.masked_fill(forbidden_V, -std::numeric_limits<double>::infinity());
}

}  // namespace

int64_t sample_token(const at::Tensor& logits_V, double temperature, double top_p, double draw) {
  const at::Tensor logits = logits_V.to(at::kCPU, at::kDouble);
  if (temperature <= 0) return logits.argmax().item<int64_t>();
  const at::Tensor p = at::softmax(logits / temperature, -1);
  const auto [sorted, order] = at::sort(p, /*stable=*/true, /*dim=*/-1, /*descending=*/true);
  const at::Tensor before = sorted.cumsum(-1) - sorted;
  // A token stays if what stands before it has not reached top_p yet; the likeliest always stays.
  at::Tensor kept = sorted.masked_fill(before >= top_p, 0);
  if (kept.sum().item<double>() <= 0) kept[0] = 1;
  const at::Tensor cumulative = kept.cumsum(-1);
  const double target = draw * cumulative[-1].item<double>();
  const int64_t index = (cumulative <= target).sum().item<int64_t>();
  return order[std::min(index, order.size(0) - 1)].item<int64_t>();
}

std::vector<int32_t> generate(const deepseek_v3::Model& model, std::vector<int32_t> prompt,
                              const GenerateOptions& options,
                              const std::function<void(int32_t)>& on_token) {
  LONGHAUL_CHECK(!prompt.empty() && options.max_context >= 1, "generate: an empty prompt");
  const at::NoGradGuard no_grad;
  const CounterRng rng(options.seed, "generate");
  const at::Tensor forbidden = forbidden_ids(model.config().vocab_size, options.may_draw);
  std::vector<int32_t> context = std::move(prompt), generated;
  for (int64_t i = 0; i < options.max_new_tokens; ++i) {
    if (static_cast<int64_t>(context.size()) > options.max_context) {
      context.erase(context.begin(), context.end() - options.max_context);
    }
    const at::Tensor logits = drawable(last_logits(model, context).to(at::kCPU), forbidden);
    const auto token = static_cast<int32_t>(sample_token(logits, options.temperature, options.top_p,
                                                         rng.uniform(static_cast<uint64_t>(i))));
    if (token == options.stop_token) break;
    generated.push_back(token);
    context.push_back(token);
    if (on_token) on_token(token);
  }
  return generated;
}

}  // namespace longhaul::train
