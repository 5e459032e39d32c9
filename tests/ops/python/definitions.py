"""The operators' definitions in a few lines of plain PyTorch each. Sequences are flat, [T, ...];
what a query may see is a mask [T, T]."""

import torch


def visible(starts):
    """Causal, from the start of the query's document on; nothing where that is behind the query."""
    position = torch.arange(len(starts))
    return (position >= starts[:, None]) & (position <= position[:, None])


def mask_of(indices, keys):
    """[T, K] indices with -1 for none as a mask [T, keys]."""
    wide = torch.zeros(indices.shape[0], keys + 1, dtype=torch.bool)
    index = torch.where(indices < 0, keys, indices).long()
    return wide.scatter_(1, index, True)[:, :keys]


def rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def swiglu(x, dim):
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def rotary_mul(x, cos, sin, mode):
    if mode == "half":
        half = x.shape[-1] // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    else:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos + turned * sin


def probabilities(query, key, mask, scale):
    """[T, H, T]; zeros for a query without a key. Keys [T, D], or [T, H, D]."""
    keys = "sd" if key.dim() == 2 else "shd"
    scores = torch.einsum(f"thd,{keys}->ths", query, key) * scale
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)), scores.logsumexp(-1)


def attention(query, key, value, mask, scale):
    """Keys and values [T, D], or [T, H, D] each."""
    p, _ = probabilities(query, key, mask, scale)
    return torch.einsum("ths,sd->thd" if value.dim() == 2 else "ths,shd->thd", p, value)


def index_scores(query, key, weights):
    return torch.einsum("tjd,sd->tjs", query, key).relu().mul(weights[..., None]).sum(1)


def selection(scores, mask, count):
    """Ties to the lowest key: a score may be exactly 0."""
    scores = scores.masked_fill(~mask, -torch.inf)
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(mask).scatter_(1, chosen, True) & mask


def index_softmax(scores, mask):
    scores = scores.masked_fill(~mask, -torch.inf)
    return torch.nan_to_num(scores, neginf=-1e30).softmax(-1) * mask, scores.logsumexp(-1)


def kl_loss(scores, p, mask):
    """p: the attention's probabilities [T, H, T]."""
    target = p.sum(1)
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-30)
    log_r = scores.masked_fill(~mask, -1e30).log_softmax(-1)
    terms = torch.xlogy(target, target) - target * log_r
    return terms.masked_fill(~mask, 0).sum()


def gating(logits, count, softmax, scale):
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    weights, _ = scores.topk(count)
    if not softmax:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, scores


def grouped_matmul(x, weight, counts):
    parts = x.split(counts.tolist())
    return torch.cat([part @ w.T for part, w in zip(parts, weight, strict=True)])


def adam_w(p, g, m, v, step, lr, beta1, beta2, eps, weight_decay):
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p * (1 - lr * weight_decay)
    p = p - lr / (1 - beta1**step) * m / ((v / (1 - beta2**step)).sqrt() + eps)
    return p, m, v
