"""A DeepSeek-V3.2-style model in eager PyTorch: the other side of longhaul's benchmarks.

Small operators as a practised PyTorch user writes them, for rows that hold one document each; no
parallelism, no padding, no cache. compile_parts() turns them into what torch.compile makes of them.
docs/benchmarks.md says which variants were tried and why these won. Called by train.py (timing) and
check_golden.py (the same numbers as the reference vectors).

Sizes: B rows, S tokens, D hidden, H heads, N, R, V head dims (no rope, rope, value), C and Q latent
widths, Hi and Di indexer heads and head dim, K keys a query keeps, E experts, I expert width.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import tensor_file

MASKED = -1e30  # finite: zero times it is zero, which the KL loss relies on
LATENT_NORM_EPS = 1e-6  # of the latent norms and the indexer's, whatever rms_norm_eps says


@dataclass(frozen=True)
class Variant:
    """How attention is computed."""

    query_block: int = 0  # queries at a time that share their visible keys; 0: all, over all keys
    # In this dtype over copies of the chosen latents (absorbed form); None: over all keys (expanded
    # form) with a mask.
    gathered: torch.dtype | None = None


class Config:
    """A config.json with the optional keys filled in."""

    def __init__(self, values):
        self.__dict__.update({"num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1})
        self.__dict__.update(values)
        rope = self.rope_parameters
        self.rope_theta = rope["rope_theta"]
        self.yarn = rope if rope.get("rope_type") == "yarn" else None

    @classmethod
    def read(cls, path):
        return cls(json.loads(Path(path).read_text()))


def mscale(factor, m):
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_frequencies(config):
    """Angle a position of each pair, and the factor on cos and sin."""
    dim, theta, yarn = config.qk_rope_head_dim, config.rope_theta, config.yarn
    pair = torch.arange(0, dim, 2, dtype=torch.float64)
    frequency = theta ** (-pair / dim)
    if yarn is None:
        return frequency, 1.0

    def edge(rotations):
        length = yarn["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(theta))

    low = max(math.floor(edge(yarn["beta_fast"])), 0)
    high = min(math.ceil(edge(yarn["beta_slow"])), dim - 1)
    ramp = ((pair / 2 - low) / max(high - low, 0.001)).clamp(0, 1)
    factor = yarn["factor"]
    scaling = mscale(factor, yarn["mscale"]) / mscale(factor, yarn["mscale_all_dim"])
    return frequency / factor * ramp + frequency * (1 - ramp), scaling


def softmax_scale(config):
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if config.yarn and config.yarn.get("mscale_all_dim"):
        scale *= mscale(config.yarn["factor"], config.yarn["mscale_all_dim"]) ** 2
    return scale


class Rope:
    """cos + i sin [S, R/2] of the positions 0 .. S-1, made once for a length. Real ones,
    [S, R/2, 2], for torch.compile, which makes no code for complex numbers."""

    real = False

    def __init__(self, config):
        self.frequency, self.scaling = rope_frequencies(config)
        self.turn = torch.empty(0, 0)

    def table(self, length):
        if self.turn.size(0) != length:
            angle = torch.arange(length, dtype=torch.float64).unsqueeze(1) * self.frequency
            turn = torch.polar(torch.full_like(angle, self.scaling), angle).to(torch.complex64)
            self.turn = torch.view_as_real(turn) if self.real else turn
        return self.turn


def rotate_pairs(x_BSHR, turn):
    """Rotates the pairs (0, 1), (2, 3), ... of the last dim."""
    pairs = x_BSHR.unflatten(-1, (-1, 2))
    if turn.is_complex():
        return torch.view_as_real(torch.view_as_complex(pairs) * turn.unsqueeze(1)).flatten(-2)
    a, b = pairs.unbind(-1)
    cos, sin = turn.unsqueeze(1).unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def rotate_halves(x_BSHR, turn):
    """Rotates the pairs (0, R/2), (1, R/2 + 1), ... of the last dim."""
    a, b = x_BSHR.chunk(2, dim=-1)
    turn = torch.view_as_real(turn) if turn.is_complex() else turn
    cos, sin = turn.unsqueeze(1).unbind(-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Indexer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.wq_b = linear(config.q_lora_rank or config.hidden_size, self.heads * self.head_dim)
        self.wk = linear(config.hidden_size, self.head_dim)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=LATENT_NORM_EPS)
        self.weights_proj = linear(config.hidden_size, self.heads)

    def rotate(self, x_BSHD, turn):
        rope, rest = x_BSHD.split((self.rope_dim, self.head_dim - self.rope_dim), dim=-1)
        return torch.cat((rotate_halves(rope, turn), rest), dim=-1)

    def forward(self, x_BSD, latent_BSQ, turn):
        """Queries [B, S, Hi, Di], keys [B, S, Di], weights [B, S, Hi]; the inputs learn nothing."""
        x, latent = x_BSD.detach(), latent_BSQ.detach()
        q = self.rotate(self.wq_b(latent).unflatten(-1, (self.heads, -1)), turn)
        k = self.rotate(self.k_norm(self.wk(x)).unsqueeze(2), turn).squeeze(2)
        return q, k, self.weights_proj(x) * (self.heads * self.head_dim) ** -0.5


def index_scores(q_BTHD, k_BSD, w_BTH):
    """The indexer's score [B, T, S] of every key for every query."""
    B, T, H, _ = q_BTHD.shape
    dots = torch.bmm(q_BTHD.flatten(1, 2), k_BSD.transpose(1, 2))
    if torch.compiler.is_compiling():  # one pass for relu, weights and sum
        return (dots.view(B, T, H, -1).relu() * w_BTH.unsqueeze(-1)).sum(2)
    return torch.bmm(w_BTH.reshape(B * T, 1, H), dots.relu_().view(B * T, H, -1)).view(B, T, -1)


def choose(scores_BTS, k):
    """The k keys of largest score of each query: scores and indices [B, T, k]."""
    S = scores_BTS.size(2)
    if S <= k:
        return scores_BTS, torch.arange(S).expand_as(scores_BTS)
    return scores_BTS.topk(k, dim=-1, sorted=False)


def kl_loss(head_sum, scores):
    """KL(attention || indexer) over the chosen keys, summed over the queries."""
    target = head_sum / head_sum.sum(-1, keepdim=True)
    return F.kl_div(F.log_softmax(scores, dim=-1), target, reduction="sum")


def rows_of(x_BSW, indices_BTK):
    """Copies of the rows that each query chose, [B * T, K, W]."""
    B, S, _ = x_BSW.shape
    first = torch.arange(0, B * S, S).view(B, 1, 1)
    return F.embedding((indices_BTK + first).flatten(0, 1), x_BSW.flatten(0, 1))


def masked_attention(q, k, v, scores, topk, future, scale):
    """Attention of T queries over the topk of S keys, and the sum of their indexer losses.

    q [B*H, T, W], k and v [B*H, S, ...], scores of the indexer [B, T, S], future [T, S] (MASKED
    where the query may not look)
    """
    B, T, S = scores.shape
    H = q.size(0) // B
    indices = choose(scores.detach(), topk)[1]
    mask = future.expand(B, T, S)
    if S > topk:
        mask = torch.full_like(scores, MASKED).scatter_(2, indices, 0.0) + future
    mask = (mask.expand(H, T, S) if B == 1 else mask.repeat_interleave(H, 0)).to(q.dtype)
    if torch.compiler.is_compiling():  # one pass for scale, mask and softmax's first reduction
        p = (torch.bmm(q, k.transpose(1, 2)) * scale + mask).softmax(-1)
    else:  # the mask as the addend of the product, which saves a pass over all scores
        p = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=scale).softmax(-1)
    head_sum = p.detach().float().view(B, H, T, S).sum(1)
    if S > topk:
        head_sum, scores = head_sum.gather(2, indices), scores.gather(2, indices)
    return torch.bmm(p, v), kl_loss(head_sum, scores)


def gathered_attention(q, kv_BSW, value_dim, indexer_inputs, topk, future, scale):
    """The same over copies of the chosen rows: q [B, T, H, W], the output [B, T, H, value_dim].

    The indexer's scores of these keys are made a second time, so that no gradient is S wide.
    """
    qi, ki, w = indexer_inputs
    B, T = q.shape[:2]
    with torch.no_grad():
        # In fp32, which oneDNN multiplies faster than bf16 on Intel without AMX.
        scores, indices = choose(index_scores(qi.float(), ki.float(), w) + future, topk)
        mask = torch.where(scores < 0.5 * MASKED, MASKED, 0.0).flatten(0, 1)
    rows, index_rows = rows_of(kv_BSW, indices), rows_of(ki, indices)
    logits = torch.bmm(q.flatten(0, 1), rows.transpose(1, 2)) * scale
    p = (logits + mask.unsqueeze(1).to(q.dtype)).softmax(-1)
    dots = torch.bmm(qi.flatten(0, 1), index_rows.transpose(1, 2)).relu()
    chosen = (dots * w.flatten(0, 1).unsqueeze(-1)).sum(1) + mask
    out = torch.bmm(p, rows[..., :value_dim]).view(B, T, -1, value_dim)
    return out, kl_loss(p.detach().float().sum(1), chosen)


class Attention(nn.Module):
    def __init__(self, config, variant):
        super().__init__()
        self.heads = config.num_attention_heads
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value, self.latent = config.v_head_dim, config.kv_lora_rank
        self.topk, self.scale = config.index_topk, softmax_scale(config)
        self.variant = variant
        D, Q = config.hidden_size, config.q_lora_rank
        query_width = self.heads * (self.nope + self.rope)
        if Q:
            self.q_a_proj = linear(D, Q)
            self.q_a_layernorm = nn.RMSNorm(Q, eps=LATENT_NORM_EPS)
            self.q_b_proj = linear(Q, query_width)
        else:
            self.q_proj = linear(D, query_width)
        self.kv_a_proj_with_mqa = linear(D, self.latent + self.rope)
        self.kv_a_layernorm = nn.RMSNorm(self.latent, eps=LATENT_NORM_EPS)
        self.kv_b_proj = linear(self.latent, self.heads * (self.nope + self.value))
        self.o_proj = linear(self.heads * self.value, D)
        self.indexer = Indexer(config)

    def queries(self, x_BSD, turn):
        """Without and with rope, [B, S, H, ...], and what the indexer makes its own of."""
        latent = x_BSD
        if hasattr(self, "q_proj"):
            q = self.q_proj(x_BSD)
        else:
            latent = self.q_a_layernorm(self.q_a_proj(x_BSD))
            q = self.q_b_proj(latent)
        nope, rope = q.unflatten(-1, (self.heads, -1)).split((self.nope, self.rope), dim=-1)
        return nope, rotate_pairs(rope, turn), latent

    def latents(self, x_BSD, turn):
        """The normalised latents [B, S, C] and the rope keys [B, S, 1, R]."""
        latent, rope = self.kv_a_proj_with_mqa(x_BSD).split((self.latent, self.rope), dim=-1)
        return self.kv_a_layernorm(latent), rotate_pairs(rope.unsqueeze(2), turn)

    def ranges(self, S):
        """Begin and end of each block of queries; none of a block sees a key from its end on."""
        size = self.variant.query_block or S
        return [(t, min(t + size, S)) for t in range(0, S, size)]

    def attend_masked(self, nope, rope, latent, k_rope, indexer_inputs):
        """Values [B, S, H, V] and the sum of the indexer's losses, in expanded form."""
        B, S = latent.shape[:2]
        kv = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split((self.nope, self.value), dim=-1)
        q = torch.cat((nope, rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, self.heads, -1)), dim=-1)
        q, k, v = (t.transpose(1, 2).reshape(B * self.heads, S, -1) for t in (q, k, v))
        qi, ki, w = indexer_inputs
        outs, losses = [], []
        for t, e in self.ranges(S):
            future = torch.full((e - t, e), MASKED).triu(t + 1)
            scores = index_scores(qi[:, t:e], ki[:, :e], w[:, t:e]) + future
            out, loss = masked_attention(
                q[:, t:e], k[:, :e], v[:, :e], scores, self.topk, future, self.scale
            )
            outs.append(out)
            losses.append(loss)
        out = torch.cat(outs, dim=1) if len(outs) > 1 else outs[0]
        return out.view(B, self.heads, S, -1).transpose(1, 2), sum(losses)

    def attend_gathered(self, nope, rope, latent, k_rope, indexer_inputs):
        """The same in absorbed form."""
        kv_b = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        w_uk, w_uv = kv_b.split((self.nope, self.value), dim=1)
        dtype = self.variant.gathered
        q = torch.cat((torch.einsum("bshn,hnc->bshc", nope, w_uk), rope), dim=-1).to(dtype)
        kv = torch.cat((latent, k_rope.squeeze(2)), dim=-1).to(dtype)
        qi, ki, w = indexer_inputs
        qi, ki = qi.to(dtype), ki.to(dtype)
        outs, losses = [], []
        for t, e in self.ranges(latent.size(1)):
            future = torch.full((e - t, e), MASKED).triu(t + 1)
            block = qi[:, t:e], ki[:, :e], w[:, t:e]
            out, loss = gathered_attention(
                q[:, t:e], kv[:, :e], self.latent, block, self.topk, future, self.scale
            )
            outs.append(out)
            losses.append(loss)
        out = torch.cat(outs, dim=1).to(w_uv.dtype)
        return torch.einsum("bshc,hvc->bshv", out, w_uv), sum(losses)

    def forward(self, x_BSD, turn):
        """The output and the indexer's loss, a mean over the queries."""
        nope, rope, q_latent = self.queries(x_BSD, turn)
        indexer_inputs = self.indexer(x_BSD, q_latent, turn)
        attend = self.attend_gathered if self.variant.gathered else self.attend_masked
        out, loss = attend(nope, rope, *self.latents(x_BSD, turn), indexer_inputs)
        return self.o_proj(out.flatten(2)), loss / (x_BSD.size(0) * x_BSD.size(1))


class Mlp(nn.Module):
    def __init__(self, hidden, width):
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, width), linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """All experts of a layer, each matrix [E, out, in]; gate and up stand one above the other."""

    def __init__(self, config):
        super().__init__()
        E, D, I = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(E, 2 * I, D))
        self.down = nn.Parameter(torch.empty(E, D, I))

    def each(self, rows, counts, weights):
        # unbind: one stacked gradient, where indexing would make one of full size an expert.
        return torch.cat([F.linear(x, w) for x, w in zip(rows.split(counts), weights.unbind())])

    def activate(self, both):
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, rows, counts):
        return self.each(self.activate(self.each(rows, counts, self.gate_up)), counts, self.down)


class Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.counts = None  # tokens of each expert in the last forward pass

    def allowed(self, choice_TE):
        """The scores with the experts of all but the best groups struck out."""
        groups = choice_TE.unflatten(-1, (self.c.n_group, -1))
        best = groups.topk(min(2, groups.size(-1)), dim=-1).values.sum(-1)
        kept = best.topk(self.c.topk_group, dim=-1, sorted=False).indices
        struck = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        return groups.masked_fill(struck.unsqueeze(-1), -math.inf).flatten(1)

    def forward(self, x_TD):
        scores = F.linear(x_TD, self.weight).sigmoid()
        choice = self.allowed(scores.detach() + self.e_score_correction_bias)
        experts = choice.topk(self.c.num_experts_per_tok, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.c.routed_scaling_factor

    def update_bias(self, speed):
        counts = self.counts.float()
        delta = speed * (counts.mean() - counts).sign()
        self.e_score_correction_bias += delta - delta.mean()


class Moe(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate, self.experts = Router(config), Experts(config)
        width = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = Mlp(config.hidden_size, width)

    def dispatch(self, x_TD):
        """A row for each choice, sorted by expert, with its token and weight; tokens an expert."""
        experts, weights = self.gate(x_TD)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self.gate.weight.size(0))
        token = order // experts.size(1)
        return x_TD[token], token, weights.flatten()[order].unsqueeze(1), counts

    def combine(self, x_TD, rows, token, weights):
        return self.shared_experts(x_TD).index_add(0, token, rows * weights)

    def forward(self, x_BSD):
        x = x_BSD.flatten(0, 1)
        rows, token, weights, self.gate.counts = self.dispatch(x)
        rows = self.experts(rows, self.gate.counts.tolist())
        return self.combine(x, rows, token, weights).view_as(x_BSD)


class Block(nn.Module):
    def __init__(self, layer, config, variant):
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(D, eps=eps)
        self.self_attn = Attention(config, variant)
        self.post_attention_layernorm = nn.RMSNorm(D, eps=eps)
        dense = layer < config.first_k_dense_replace
        self.mlp = Mlp(D, config.intermediate_size) if dense else Moe(config)

    def attend(self, x, turn):
        """The hidden state after attention, what the MLP takes, and the indexer's loss."""
        attended, loss = self.self_attn(self.input_layernorm(x), turn)
        x = x + attended
        return x, self.post_attention_layernorm(x), loss

    def forward(self, x, turn):
        x, normed, loss = self.attend(x, turn)
        return x + self.mlp(normed), loss


class MtpBlock(Block):
    """Predicts one token further, from the hidden state and the next token's embedding."""

    def __init__(self, layer, config, variant):
        super().__init__(layer, config, variant)
        D, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = nn.RMSNorm(D, eps=eps), nn.RMSNorm(D, eps=eps)
        self.eh_proj = linear(2 * D, D)

    def forward(self, embedding, hidden, turn):
        both = torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1)
        return super().forward(self.eh_proj(both), turn)


class Trunk(nn.Module):
    def __init__(self, config, variant):
        super().__init__()
        n, depth = config.num_hidden_layers, config.num_nextn_predict_layers
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        blocks = [Block(i, config, variant) for i in range(n)]
        blocks += [MtpBlock(i, config, variant) for i in range(n, n + depth)]
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Model(nn.Module):
    def __init__(self, config, variant=Variant()):
        super().__init__()
        self.config = config
        self.rope = Rope(config)
        self.model = Trunk(config, variant)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def forward(self, ids, depth=0):
        """ids [B, S + depth] to the logits of the trunk and of each MTP depth, [B, S, vocab] each,
        and every layer's indexer loss."""
        S = ids.size(1) - depth
        turn = self.rope.table(S)
        h = self.model.embed_tokens(ids[:, :S])
        losses, logits = [], []
        n = self.config.num_hidden_layers
        for block in self.model.layers[:n]:
            h, loss = block(h, turn)
            losses.append(loss)
        logits.append(self.head(h))
        for k, block in enumerate(self.model.layers[n : n + depth], start=1):
            h, loss = block(self.model.embed_tokens(ids[:, k : k + S]), h, turn)
            losses.append(loss)
            logits.append(self.head(h))
        return logits, torch.stack(losses)

    def head(self, h):
        return self.lm_head(self.model.norm(h))

    def routers(self):
        return [m for m in self.modules() if isinstance(m, Router)]


def hf_views(name, tensor):
    """The Hugging Face names and parts of one of our parameters (or its gradient)."""
    if name.endswith("experts.gate_up"):
        stem = name.removesuffix("gate_up")
        for e, both in enumerate(tensor):
            gate, up = both.chunk(2)
            yield f"{stem}{e}.gate_proj.weight", gate
            yield f"{stem}{e}.up_proj.weight", up
    elif name.endswith("experts.down"):
        stem = name.removesuffix("down")
        for e, matrix in enumerate(tensor):
            yield f"{stem}{e}.down_proj.weight", matrix
    else:
        yield name, tensor


def compile_parts(model):
    """torch.compile for all but the experts' products, whose row counts are numbers on the host."""
    model.rope.real = True

    def compiled(function):
        return torch.compile(function, fullgraph=True, dynamic=False)

    for block in model.model.layers:
        block.attend = compiled(block.attend)
        if isinstance(block.mlp, Moe):
            block.mlp.dispatch = compiled(block.mlp.dispatch)
            block.mlp.combine = compiled(block.mlp.combine)
            block.mlp.experts.activate = compiled(block.mlp.experts.activate)
        else:
            block.mlp.forward = compiled(block.mlp.forward)
    model.head = compiled(model.head)


def load(folder, variant=Variant()):
    """The model of a Hugging Face folder with config.json and model.safetensors."""
    folder = Path(folder)
    model = Model(Config.read(folder / "config.json"), variant)
    source = tensor_file.read(folder / "model.safetensors")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            for hf_name, part in hf_views(name, tensor):
                part.copy_(source[hf_name])
    return model
