"""liblonghaul_ops.so in an ordinary PyTorch process: every operator of torch.ops.longhaul against
its definition in plain PyTorch (definitions.py), forward and gradients, in both layouts, in fp32
through the kernels and in fp64; then registration (schema, autograd, fake tensors, tracing),
torch.compile, and errors.

    library_test.py path/to/liblonghaul_ops.so
"""

import sys
import unittest
from pathlib import Path

import definitions as plain
import torch
from torch.testing._internal.optests import aot_autograd_check

ops = torch.ops.longhaul
SCALE = 0.125


def random(*shape, dtype=torch.float32, seed=0):
    """Exact in fp32, so that both dtypes see the same numbers."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def constant(*shape, **options):
    return random(*shape, **options).detach()


class Sequences:
    """Packed documents (TND), or rows with padding (BSND)."""

    def __init__(self, layout):
        self.layout = layout
        if layout == "TND":
            self.ends = [5, 33]
            self.shape = (33,)
            self.rows = 1
            self.starts = torch.tensor([0] * 5 + [5] * 28)
        else:
            self.ends = [19, 12]
            self.shape = (2, 19)
            self.rows = 2
            position = torch.arange(19)
            padded = torch.where(position < 12, 0, position + 1)
            self.starts = torch.cat([torch.zeros(19, dtype=torch.long), padded + 19])
        self.mask = plain.visible(self.starts)
        self.length = self.shape[-1]

    def tensor_lengths(self, query, key):
        ends = torch.tensor(self.ends)
        return {query: ends, key: ends}

    def int_lengths(self):
        return {"actual_seq_qlen": self.ends, "actual_seq_klen": self.ends, "layout": self.layout}

    def random(self, *shape, **options):
        return random(*self.shape, *shape, **options)

    def flat(self, x):
        return x if self.layout == "TND" else x.flatten(0, 1)

    def mask_of(self, indices):
        """[T, T] of indices in the operators' layout."""
        offset = torch.arange(self.rows).repeat_interleave(self.length)[:, None] * self.length
        index = self.flat(indices)[:, 0]
        return plain.mask_of(torch.where(index < 0, -1, index + offset), self.rows * self.length)

    def by_row(self, whole):
        """[T, T] as [T, 1, keys of the row], in the operators' layout."""
        n = self.length
        rows = [whole[i * n : (i + 1) * n, i * n : (i + 1) * n] for i in range(self.rows)]
        return torch.stack(rows).unsqueeze(2) if self.layout == "BSND" else rows[0].unsqueeze(1)

    def statistics(self, x):
        """[T, ...] as [B, 1, S, ...], or [1, T, ...]."""
        if self.layout == "TND":
            return x.unsqueeze(0)
        return x.view(2, 19, *x.shape[1:]).unsqueeze(1)

    def indices(self, width, seed=3):
        """Random visible keys in shuffled order, with gaps."""
        generator = torch.Generator().manual_seed(seed)
        found = torch.full((*self.shape, 1, width), -1, dtype=torch.int32)
        flat = self.flat(found)
        for t in range(len(self.starts)):
            keys = self.mask[t].nonzero()[:, 0]
            keys = keys[torch.randperm(len(keys), generator=generator)][:width] % self.length
            flat[t, 0, torch.randperm(width, generator=generator)[: len(keys)]] = keys.int()
        return found


def attention_inputs(s, dtype, H=4, D=64, R=32):
    return [
        s.random(H, D, dtype=dtype),
        s.random(1, D, dtype=dtype, seed=1),
        s.random(H, R, dtype=dtype, seed=2),
        s.random(1, R, dtype=dtype, seed=3),
    ]


def index_inputs(s, dtype, H=3, D=32):
    return [
        s.random(H, D, dtype=dtype, seed=4),
        s.random(1, D, dtype=dtype, seed=5),
        s.random(H, dtype=dtype, seed=6),
    ]


def joined(s, nope, rope):
    return s.flat(torch.cat([nope, rope], -1))


def gradients(outputs, inputs):
    """Of a weighted sum of the outputs, so that no element's gradient is the same as another's."""
    weights = [torch.linspace(-1, 2, o.numel()).view(o.shape) for o in outputs]
    total = sum((o.double() * w).sum() for o, w in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, inputs)


def in_both_layouts(test):
    """Runs a test for each layout and dtype."""

    def run(self):
        for layout in ("BSND", "TND"):
            for dtype in (torch.float32, torch.float64):
                with self.subTest(layout=layout, dtype=dtype):
                    test(self, Sequences(layout), dtype)

    return run


class TestCase(unittest.TestCase):
    def close(self, actual, expected, dtype):
        """Relative to the largest element."""
        self.assertEqual(actual.shape, expected.shape)
        if actual.numel() == 0:
            return
        error = (actual.double() - expected.double()).abs().max().item()
        largest = max(expected.double().abs().max().item(), 1e-3)
        self.assertLess(error / largest, 1e-11 if dtype == torch.float64 else 1e-5)

    def same(self, ours, definition, inputs):
        """Values and gradients; the definition runs in fp64."""
        dtype = inputs[0].dtype
        wide = [x.detach().double().requires_grad_() for x in inputs]
        a, b = ours(*inputs), definition(*wide)
        a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
        for x, y in zip(a, b, strict=True):
            self.close(x, y, dtype)
        for x, y in zip(gradients(a, inputs), gradients(b, wide), strict=True):
            self.close(x, y, dtype)


class Pointwise(TestCase):
    def test_rms_norm(self):
        for dtype in (torch.float32, torch.float64):
            x, residual = (random(3, 5, 96, dtype=dtype, seed=i) for i in (0, 1))
            weight = random(96, dtype=dtype)
            self.same(lambda x, w: ops.rms_norm(x, w)[0], plain.rms_norm, (x, weight))
            _, rstd = ops.rms_norm(x, weight)
            self.close(rstd, torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), dtype)
            self.same(
                lambda a, b, w: ops.add_rms_norm(a, b, w)[::2],
                lambda a, b, w: (plain.rms_norm(a + b, w), a + b),
                (x, residual, weight),
            )

    def test_swiglu(self):
        for dtype in (torch.float32, torch.float64):
            for shape, dim in (((7, 130), -1), ((3, 4, 10), 1), ((6, 5), 0), ((40, 8192), -1)):
                self.same(
                    lambda x, dim=dim: ops.swiglu(x, dim),
                    lambda x, dim=dim: plain.swiglu(x, dim),
                    (random(*shape, dtype=dtype),),
                )

    def test_rotary_mul(self):
        for dtype in (torch.float32, torch.float64):
            for shape in ((2, 5, 3, 16), (9, 3, 16)):
                angle = constant(*shape[:-2], 1, 8, dtype=dtype) * 3
                for mode, double in (
                    ("half", lambda a: torch.cat([a, a], -1)),
                    ("interleave", lambda a: a.repeat_interleave(2, -1)),
                ):
                    cos, sin = double(angle.cos()), double(angle.sin())
                    x = random(*shape, dtype=dtype)
                    self.same(
                        lambda x, cos=cos, sin=sin, mode=mode: ops.rotary_mul(x, cos, sin, mode),
                        lambda x, cos=cos, sin=sin, mode=mode: plain.rotary_mul(
                            x, cos.double(), sin.double(), mode
                        ),
                        (x,),
                    )
                    self.same(
                        lambda x, cos, sin, mode=mode: ops.rotary_mul(x, cos, sin, mode),
                        lambda x, cos, sin, mode=mode: plain.rotary_mul(x, cos, sin, mode),
                        (x, cos.requires_grad_(), sin.requires_grad_()),
                    )


class Attention(TestCase):
    def attend(self, s, inputs, indices, **options):
        query, key, query_rope, key_rope = inputs
        return ops.sparse_flash_attention(
            query, key, None, indices, SCALE, query_rope=query_rope, key_rope=key_rope,
            layout_query=s.layout, layout_kv=s.layout,
            **s.tensor_lengths("actual_seq_lengths_query", "actual_seq_lengths_kv"), **options,
        )  # fmt: skip

    @in_both_layouts
    def test_sparse_flash_attention(self, s, dtype):
        inputs, indices = attention_inputs(s, dtype), s.indices(7)
        mask = s.mask_of(indices)

        def definition(query, key, query_rope, key_rope, mask=mask):
            q, k = joined(s, query, query_rope), joined(s, key, key_rope)[:, 0]
            return plain.attention(q, k, mask, SCALE, key.shape[-1]).view(query.shape)

        self.same(
            lambda *x, indices=indices: self.attend(s, x, indices)[0], definition, inputs
        )
        _, maximum, total = self.attend(s, inputs, indices, return_softmax_lse=True)
        wide = [x.detach().double() for x in inputs]
        q, k = joined(s, wide[0], wide[2]), joined(s, wide[1], wide[3])[:, 0]
        p, lse = plain.probabilities(q, k, mask, SCALE)
        self.close(
            (maximum + total.log()).nan_to_num(neginf=0),
            s.statistics(lse).nan_to_num(neginf=0), dtype,
        )  # fmt: skip
        head_sum = ops.sparse_attention_head_sum(
            inputs[0], inputs[1], indices, maximum, total, SCALE,
            query_rope=inputs[2], key_rope=inputs[3], layout=s.layout,
        )  # fmt: skip
        expected = s.by_row(p.sum(1)).gather(-1, indices.long().clamp_min(0))
        self.close(head_sum, expected.masked_fill(indices < 0, 0), dtype)

    def test_without_rope(self):
        s = Sequences("TND")
        query, key, _, _ = attention_inputs(s, torch.float32)
        indices = s.indices(40)
        self.same(
            lambda q, k: ops.sparse_flash_attention(
                q, k, None, indices, SCALE, layout_query="TND", layout_kv="TND"
            )[0],
            lambda q, k: plain.attention(q, k[:, 0], s.mask, SCALE, 64),
            (query, key),
        )

    @in_both_layouts
    def test_dense_attention_head_sum(self, s, dtype):
        for heads in (1, 4):
            query = s.random(4, 48, dtype=dtype).detach()
            key = s.random(heads, 48, dtype=dtype, seed=1).detach()
            flat_key = s.flat(key.double())
            p, lse = plain.probabilities(
                s.flat(query.double()), flat_key[:, 0] if heads == 1 else flat_key, s.mask, SCALE
            )
            lse = lse.nan_to_num(neginf=0).to(dtype)
            maximum, total = lse - 0.5, torch.full_like(lse, 0.5).exp()
            if heads == 1:
                maximum, total = s.statistics(maximum), s.statistics(total)
            else:  # a head of keys for each head of queries: [B, N, S, 1]
                maximum, total = (
                    s.statistics(x).squeeze(-3 if s.layout == "TND" else 1)
                    .transpose(-1, -2).unsqueeze(-1) for x in (maximum, total)
                )  # fmt: skip
            found = ops.dense_attention_head_sum(
                query, key, maximum, total, SCALE, actual_seq_klen=s.ends, layout=s.layout
            )
            expected = s.by_row(p.sum(1))
            self.close(found, expected, dtype)
            if s.layout == "TND" and heads == 1:
                part = ops.dense_attention_head_sum(
                    query[9:25], key, maximum[:, 9:25], total[:, 9:25], SCALE,
                    actual_seq_klen=s.ends, layout=s.layout, first_query=9,
                )  # fmt: skip
                self.close(part, expected[9:25], dtype)


class Indexer(TestCase):
    def select(self, s, inputs, count):
        return ops.lightning_indexer(
            *inputs, layout_query=s.layout, layout_key=s.layout, sparse_count=count,
            return_value=True,
            **s.tensor_lengths("actual_seq_lengths_query", "actual_seq_lengths_key"),
        )  # fmt: skip

    def scores(self, s, query, key, weights):
        return plain.index_scores(s.flat(query), s.flat(key)[:, 0], s.flat(weights))

    @in_both_layouts
    def test_lightning_indexer(self, s, dtype):
        for count in (8, 50):
            inputs = index_inputs(s, dtype)
            indices, _ = self.select(s, inputs, count)
            self.assertEqual(tuple(indices.shape), (*s.shape, 1, count))
            wide = [x.detach().double() for x in inputs]
            expected = plain.selection(self.scores(s, *wide), s.mask, count)
            self.assertTrue(torch.equal(s.mask_of(indices), expected))

            def values(query, key, weights, indices=indices):
                rows = s.by_row(self.scores(s, query, key, weights))
                chosen = rows.gather(-1, indices.long().clamp_min(0))
                return chosen.masked_fill(indices < 0, 0)

            self.same(lambda *x, count=count: self.select(s, x, count)[1], values, inputs)
        indices, values = ops.lightning_indexer(
            *inputs, layout_query=s.layout, layout_key=s.layout,
            actual_seq_lengths_key=torch.tensor(s.ends),
        )  # fmt: skip
        self.assertFalse(indices.requires_grad or values.requires_grad)
        self.assertEqual(values.numel(), 0)

    def loss_of_definition(self, s, mask, attention, inputs):
        """The loss and its gradients of the indexer's inputs."""
        q, k, q_rope, k_rope = (x.detach().double() for x in attention)
        p, _ = plain.probabilities(joined(s, q, q_rope), joined(s, k, k_rope)[:, 0], mask, SCALE)
        wide = [x.detach().double().requires_grad_() for x in inputs]
        loss = plain.kl_loss(self.scores(s, *wide), p, mask)
        return [*torch.autograd.grad(loss, wide), loss.detach().view(1)]

    def sparse_statistics(self, s, attention, indices):
        q, k, q_rope, k_rope = attention
        return ops.sparse_flash_attention(
            q, k, None, indices, SCALE, query_rope=q_rope, key_rope=k_rope, layout_query=s.layout,
            layout_kv=s.layout, return_softmax_lse=True,
        )[1:]  # fmt: skip

    @in_both_layouts
    def test_sparse_loss(self, s, dtype):
        inputs = [x.detach() for x in index_inputs(s, dtype)]
        attention = [x.detach() for x in attention_inputs(s, dtype)]
        q, k, q_rope, k_rope = attention
        indices = s.indices(7)
        expected = self.loss_of_definition(s, s.mask_of(indices), attention, inputs)
        maximum, total = self.sparse_statistics(s, attention, indices)
        found = ops.sparse_lightning_indexer_grad_kl_loss(
            q, k, *inputs, indices, maximum, total, SCALE, query_rope=q_rope, key_rope=k_rope,
            **s.int_lengths(),
        )  # fmt: skip
        for x, y in zip(found, expected, strict=True):
            self.close(x, y, dtype)
        # In halves, with the heads in two shards between whose sums an all-reduce stands.
        head_sum = sum(
            ops.sparse_attention_head_sum(
                q[..., h, :].contiguous(), k, indices, maximum[..., h].contiguous(),
                total[..., h].contiguous(), SCALE, query_rope=q_rope[..., h, :].contiguous(),
                key_rope=k_rope, layout=s.layout,
            ) for h in (slice(0, 1), slice(1, 4))
        )  # fmt: skip
        found = ops.sparse_lightning_indexer_kl_loss_from_head_sum(
            *inputs, indices, head_sum, layout=s.layout
        )
        for x, y in zip(found, expected, strict=True):
            self.close(x, y, dtype)

    @in_both_layouts
    def test_dense_loss(self, s, dtype):
        inputs = [x.detach() for x in index_inputs(s, dtype)]
        attention = [x.detach() for x in attention_inputs(s, dtype)]
        q, k, q_rope, k_rope = attention
        expected = self.loss_of_definition(s, s.mask, attention, inputs)
        maximum, total = self.sparse_statistics(s, attention, s.indices(40))
        of_index = ops.dense_lightning_indexer_softmax_lse(*inputs, **s.int_lengths())
        _, lse = plain.index_softmax(self.scores(s, *(x.double() for x in inputs)), s.mask)
        self.close(
            (of_index[0] + of_index[1].log()).nan_to_num(neginf=0),
            s.statistics(lse).nan_to_num(neginf=0), dtype,
        )  # fmt: skip
        found = ops.dense_lightning_indexer_grad_kl_loss(
            q, k, *inputs, maximum, total, *of_index, SCALE, query_rope=q_rope,
            key_rope=k_rope, **s.int_lengths(),
        )  # fmt: skip
        for x, y in zip(found, expected, strict=True):
            self.close(x, y, dtype)
        if s.layout == "TND":
            self.dense_in_pieces(s, attention, inputs, (maximum, total), of_index, expected)

    def dense_in_pieces(self, s, attention, inputs, statistics, of_index, expected):
        """In halves, some queries at a time: no head sum of all queries exists."""
        q, k, q_rope, k_rope = attention
        query, key, weights = inputs
        pieces = []
        for at in (slice(0, 9), slice(9, 33)):
            options = {"layout": "TND", "actual_seq_klen": s.ends, "first_query": at.start}
            head_sum = ops.dense_attention_head_sum(
                q[at], k, *(x[:, at] for x in statistics), SCALE, query_rope=q_rope[at],
                key_rope=k_rope, **options,
            )  # fmt: skip
            pieces.append(
                ops.dense_lightning_indexer_kl_loss_from_head_sum(
                    query[at], key, weights[at], head_sum, *(x[:, at] for x in of_index), **options
                )
            )
        d_query, d_key, d_weights, loss = zip(*pieces, strict=True)
        found = torch.cat(d_query), sum(d_key), torch.cat(d_weights), sum(loss)
        for x, y in zip(found, expected, strict=True):
            self.close(x, y, query.dtype)


class Experts(TestCase):
    def test_gating(self):
        for dtype in (torch.float32, torch.float64):
            for softmax in (True, False):

                def ours(logits, softmax=softmax):
                    return ops.moe_gating_top_k(
                        logits, 2, norm_type=0 if softmax else 1, routed_scaling_factor=2.5,
                        out_flag=True,
                    )  # fmt: skip

                logits = random(50, 8, dtype=dtype)
                self.same(
                    lambda x: ours(x)[::2],
                    lambda x, softmax=softmax: plain.gating(x, 2, softmax, 2.5),
                    (logits,),
                )
                self.same(
                    lambda x: ours(x)[0],
                    lambda x, softmax=softmax: plain.gating(x, 2, softmax, 2.5)[0],
                    (logits,),
                )
                expected = plain.gating(logits, 8, softmax, 1)[1].topk(2).indices
                self.assertTrue(torch.equal(ours(logits)[1].long(), expected))

    def test_permutation(self):
        _, experts, _ = ops.moe_gating_top_k(random(50, 8), 2, norm_type=1)
        order = experts.flatten().long().argsort(stable=True)
        for dtype in (torch.float32, torch.float64):
            tokens, probs = random(50, 24, dtype=dtype), random(50, 2, dtype=dtype)
            _, rows = ops.moe_token_permute(tokens, experts)
            self.same(
                lambda x: ops.moe_token_permute(x, experts)[0], lambda x: x[order // 2], (tokens,)
            )
            permuted = random(100, 24, dtype=dtype, seed=1)
            self.same(
                lambda x, p, rows=rows: ops.moe_token_unpermute(x, rows, p),
                lambda x, p, rows=rows: (x[rows.long()].view(50, 2, 24) * p[..., None]).sum(1),
                (permuted, probs),
            )
            self.same(
                lambda x, rows=rows: ops.moe_token_unpermute(x, rows),
                lambda x, rows=rows: x[rows.long()],
                (permuted,),
            )

    def test_grouped_matmul(self):
        counts = torch.tensor([7, 0, 30, 3])
        for dtype in (torch.float32, torch.float64):
            self.same(
                lambda x, w: ops.grouped_matmul(x, w, counts),
                lambda x, w: plain.grouped_matmul(x, w, counts),
                (random(40, 32, dtype=dtype), random(4, 64, 32, dtype=dtype)),
            )


class Training(TestCase):
    def labels(self):
        labels = torch.arange(30) * 3
        labels[::7] = -100
        return labels

    def test_linear_cross_entropy(self):
        labels = self.labels()
        for dtype in (torch.float32, torch.float64):
            hidden, weight = random(30, 32, dtype=dtype), random(100, 32, dtype=dtype)

            def definition(h, w):
                return torch.nn.functional.cross_entropy(h @ w.T, labels, reduction="sum")

            self.same(lambda h, w: ops.linear_cross_entropy(h, w, labels), definition,
                      (hidden, weight))  # fmt: skip
            self.same(
                lambda h, weight=weight: ops.linear_cross_entropy(h, weight.detach(), labels),
                lambda h, weight=weight: definition(h, weight.detach().double()),
                (hidden,),
            )
            with torch.no_grad():
                loss = ops.linear_cross_entropy(hidden, weight, labels)
            self.close(loss, definition(hidden, weight), dtype)

    def test_adam_w(self):
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        for dtype in (torch.float32, torch.float64):
            lists = [
                [constant(*shape, dtype=dtype, seed=i).abs() for shape in ((5, 7), (100,))]
                for i in range(4)
            ]
            expected = [
                plain.adam_w(*(x.double() for x in one), 3, **options)
                for one in zip(*lists, strict=True)
            ]
            versions = [p._version for p in lists[0]]
            ops.adam_w(*lists, 3, **options)
            for i, wanted in enumerate(expected):
                for x, y in zip((lists[0][i], lists[2][i], lists[3][i]), wanted, strict=True):
                    self.close(x, y, dtype)
                self.assertGreater(lists[0][i]._version, versions[i])


def samples():
    """Arguments for each operator, in both layouts where it has one."""
    x, weight, gate = random(3, 5, 64), random(64), random(6, 20)
    _, rstd = ops.rms_norm(x.detach(), weight.detach())
    r = constant(2, 5, 1, 16)
    turned = random(2, 5, 3, 16)
    yield "rms_norm", (x, weight)
    yield "rms_norm_backward", (x.detach(), x.detach(), weight.detach(), rstd)
    yield "add_rms_norm", (x, random(3, 5, 64, seed=1), weight)
    yield "add_rms_norm_backward", (x.detach(), x.detach(), weight.detach(), rstd, x.detach())
    yield "rotary_mul", (turned, r, r)
    yield "rotary_mul", (turned, r.clone().requires_grad_(), r, "interleave")
    yield "rotary_mul_backward", (turned.detach(), turned.detach(), r, r)
    yield "swiglu", (gate,)
    yield "swiglu", (gate, 0)
    yield "swiglu_backward", (gate.detach()[:, :10].contiguous(), gate.detach())
    logits = random(50, 8)
    with torch.no_grad():
        weights, experts, scores = ops.moe_gating_top_k(logits, 2, norm_type=1, out_flag=True)
    tokens, probs = random(50, 24), random(50, 2)
    permuted, rows = ops.moe_token_permute(tokens.detach(), experts)
    yield "moe_gating_top_k", (logits, 2)
    yield "moe_gating_top_k", (logits, 2), {"norm_type": 1, "out_flag": True}
    yield "moe_gating_top_k_backward", (scores, weights, experts), {"norm_type": 1}
    yield "moe_token_permute", (tokens, experts)
    yield "moe_token_permute_grad", (tokens.detach(), permuted, experts, rows)
    yield "moe_token_unpermute", (permuted.clone().requires_grad_(), rows, probs)
    yield "moe_token_unpermute", (permuted.clone().requires_grad_(), rows)
    yield "moe_token_unpermute_grad", (permuted, tokens.detach(), rows, probs.detach())
    counts = torch.tensor([7, 0, 30, 3])
    matmul = random(40, 32), random(4, 64, 32), counts
    yield "grouped_matmul", matmul
    yield "grouped_matmul_grad", (constant(40, 64), *(x.detach() for x in matmul), [True, False])
    labels = torch.arange(30)
    yield "linear_cross_entropy", (random(30, 32), random(100, 32), labels)
    yield (
        "linear_cross_entropy_and_grad",
        (constant(30, 32), constant(100, 32), labels, [True, True]),
    )
    lists = [[constant(5, 7, seed=i).abs(), constant(9, seed=i).abs()] for i in range(4)]
    yield "adam_w", (*lists, 3), {"lr": 0.1}
    for layout in ("BSND", "TND"):
        yield from samples_of_sequences(Sequences(layout))


def samples_of_sequences(s):
    both = {"layout_query": s.layout}
    attention, index = attention_inputs(s, torch.float32), index_inputs(s, torch.float32)
    query, key, query_rope, key_rope = attention
    ropes = {"query_rope": query_rope, "key_rope": key_rope}
    indices = s.indices(7)
    lengths = s.tensor_lengths("actual_seq_lengths_query", "actual_seq_lengths_kv")
    in_layout = both | {"layout_kv": s.layout}
    yield (
        "sparse_flash_attention",
        (query, key, None, indices, SCALE),
        ropes | lengths | in_layout | {"return_softmax_lse": True},
    )
    yield "sparse_flash_attention", (query, key, None, indices, SCALE), in_layout
    query, key, query_rope, key_rope = (x.detach() for x in attention)
    ropes = {"query_rope": query_rope, "key_rope": key_rope}
    out, *statistics = ops.sparse_flash_attention(
        query, key, None, indices, SCALE, **ropes, **in_layout, return_softmax_lse=True
    )
    yield (
        "sparse_flash_attention_grad",
        (query, key, None, indices, out, out, *statistics, SCALE, 1, query_rope, key_rope),
        {"layout": s.layout},
    )
    layout = {"layout": s.layout}
    yield (
        "sparse_attention_head_sum",
        (query, key, indices, *statistics, SCALE),
        ropes | layout,
    )
    lengths = s.tensor_lengths("actual_seq_lengths_query", "actual_seq_lengths_key")
    in_layout = both | {"layout_key": s.layout, "sparse_count": 9}
    yield "lightning_indexer", tuple(index), lengths | in_layout
    index = [x.detach() for x in index]
    yield "lightning_indexer", tuple(index), lengths | in_layout | {"return_value": True}
    dy = random(*indices.shape).detach()
    yield "lightning_indexer_grad", (*index[:2], dy, indices, index[2]), layout
    head_sum = ops.sparse_attention_head_sum(query, key, indices, *statistics, SCALE, **ropes,
        **layout)  # fmt: skip
    yield "sparse_lightning_indexer_kl_loss_from_head_sum", (*index, indices, head_sum), layout
    yield (
        "sparse_lightning_indexer_grad_kl_loss",
        (query, key, *index, indices, *statistics, SCALE),
        ropes | s.int_lengths(),
    )
    _, *statistics = ops.sparse_flash_attention(
        query, key, None, s.indices(40), SCALE, **ropes, **both, layout_kv=s.layout,
        return_softmax_lse=True,
    )  # fmt: skip
    keys = layout | {"actual_seq_klen": s.ends}
    yield "dense_attention_head_sum", (query, key, *statistics, SCALE), ropes | keys
    yield "dense_lightning_indexer_softmax_lse", tuple(index), s.int_lengths()
    of_index = ops.dense_lightning_indexer_softmax_lse(*index, **s.int_lengths())
    yield (
        "dense_lightning_indexer_grad_kl_loss",
        (query, key, *index, *statistics, *of_index, SCALE),
        ropes | s.int_lengths(),
    )
    head_sum = ops.dense_attention_head_sum(query, key, *statistics, SCALE, **ropes, **keys)
    yield "dense_lightning_indexer_kl_loss_from_head_sum", (*index, head_sum, *of_index), keys


class Registration(TestCase):
    def test_every_operator(self):
        names = set()
        for name, arguments, *options in samples():
            names.add(name)
            with self.subTest(name, options=options):
                kwargs = options[0] if options else {}
                torch.library.opcheck(getattr(ops, name).default, arguments, kwargs)
        registered = {
            name.removeprefix("longhaul::")
            for name in torch._C._dispatch_get_all_op_names()
            if name.startswith("longhaul::")
        }
        self.assertEqual(names, registered)

    def test_the_gradient_of_the_index_scores(self):
        """opcheck adds up the outputs from the first one on, which must not be of integers."""
        for layout in ("BSND", "TND"):
            s = Sequences(layout)

            def scores(query, key, weights, s=s):
                return ops.lightning_indexer(
                    query, key, weights, layout_query=s.layout, layout_key=s.layout,
                    sparse_count=9, return_value=True,
                    actual_seq_lengths_query=torch.tensor(s.ends),
                )[1]  # fmt: skip

            aot_autograd_check(scores, tuple(index_inputs(s, torch.float32)), {}, dynamic=True)

    def test_a_gradient_of_a_gradient_is_refused(self):
        x = random(6, 20)
        (d_x,) = torch.autograd.grad(ops.swiglu(x).square().sum(), x, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "swiglu_backward"):
            torch.autograd.grad(d_x.sum(), x)

    def test_another_device_brings_its_own_kernel(self):
        library = torch.library.Library("longhaul", "IMPL", "PrivateUse1")
        library.impl("swiglu", lambda input, dim=-1: input)
        self.assertTrue(
            torch._C._dispatch_has_kernel_for_dispatch_key("longhaul::swiglu", "PrivateUse1")
        )
        library._destroy()


class Compiled(TestCase):
    def test_a_step(self):
        s = Sequences("TND")
        ends = torch.tensor(s.ends)
        labels = torch.arange(33) % 50
        query_rope, key_rope = s.random(4, 32).detach(), s.random(1, 32).detach()
        index = [x.detach() for x in index_inputs(s, torch.float32)]
        parameters = [
            random(33, 64), random(64), random(4 * 64, 64, seed=1), random(64, 64, seed=2),
            random(64, 4 * 64, seed=3), random(8, 64, seed=4), random(8, 128, 64, seed=5),
            random(8, 64, 64, seed=6), random(50, 64, seed=7),
        ]  # fmt: skip

        def loss(hidden, norm, wq, wk, wo, router, up, down, head):
            x, _ = ops.rms_norm(hidden, norm)
            query, key = (x @ wq.T / 8).view(33, 4, 64), (x @ wk.T / 8).view(33, 1, 64)
            indices, values = ops.lightning_indexer(
                *index, actual_seq_lengths_query=ends, layout_query="TND", layout_key="TND",
                sparse_count=9, return_value=True,
            )  # fmt: skip
            out, maximum, total = ops.sparse_flash_attention(
                query, key, None, indices, SCALE, query_rope=query_rope, key_rope=key_rope,
                layout_query="TND", layout_kv="TND", return_softmax_lse=True,
            )  # fmt: skip
            *_, kl = ops.sparse_lightning_indexer_grad_kl_loss(
                query.detach(), key.detach(), *index, indices, maximum, total, SCALE,
                query_rope=query_rope, key_rope=key_rope, layout="TND",
            )  # fmt: skip
            x, _, residual = ops.add_rms_norm(hidden, out.flatten(1) @ wo.T / 16, norm)
            weights, experts, _ = ops.moe_gating_top_k(x @ router.T / 8, 2, norm_type=1)
            rows, places = ops.moe_token_permute(x, experts)
            counts = torch.nn.functional.one_hot(experts.flatten().long(), 8).sum(0)
            rows = ops.swiglu(ops.grouped_matmul(rows, up / 8, counts))
            rows = ops.grouped_matmul(rows, down / 8, counts)
            x = residual + ops.moe_token_unpermute(rows, places, weights)
            return ops.linear_cross_entropy(x, head, labels) / 33, kl

        compiled = torch.compile(loss, fullgraph=True)
        total, kl = loss(*parameters)
        compiled_total, compiled_kl = compiled(*parameters)
        self.close(compiled_total, total, torch.float32)
        self.close(compiled_kl, kl, torch.float32)
        expected = torch.autograd.grad(total, parameters)
        found = torch.autograd.grad(compiled_total, parameters)
        for x, y in zip(found, expected, strict=True):
            self.close(x, y, torch.float32)

        @torch.compile(fullgraph=True)
        def update(params, grads, exp_avgs, exp_avg_sqs):
            ops.adam_w(params, grads, exp_avgs, exp_avg_sqs, 1, lr=0.1)

        lists = [[x.detach().clone() for x in parameters], list(expected)]
        lists += [[torch.zeros_like(x) for x in parameters] for _ in range(2)]
        copies = [[x.clone() for x in one] for one in lists]
        ops.adam_w(*lists, 1, lr=0.1)
        update(*copies)
        for one, other in zip(lists, copies, strict=True):
            for x, y in zip(one, other, strict=True):
                self.assertTrue(torch.equal(x, y))


class Errors(TestCase):
    def refuses(self, text, op, *arguments, **options):
        with self.assertRaisesRegex(RuntimeError, text):
            op(*arguments, **options)

    def test_what_does_not_fit_is_named(self):
        zeros = torch.zeros
        self.refuses("layout 'SBH'", ops.lightning_indexer, zeros(2, 3, 4), zeros(2, 3, 1),
                     zeros(2, 3), layout_query="SBH", layout_key="SBH")  # fmt: skip
        self.refuses("rms_norm: gamma", ops.rms_norm, zeros(2, 8), zeros(9))
        self.refuses("no two halves", ops.swiglu, zeros(2, 7))
        self.refuses("rotary_mode 'quarter'", ops.rotary_mul, zeros(1, 2, 1, 4), zeros(1, 2, 1, 4),
                     zeros(1, 2, 1, 4), "quarter")  # fmt: skip
        self.refuses("eps is", ops.moe_gating_top_k, zeros(2, 4), 1, eps=1e-3)
        self.refuses("group_select_mode", ops.moe_gating_top_k, zeros(2, 4), 1, group_count=2)
        self.refuses("num_out_tokens", ops.moe_token_permute, zeros(2, 4),
                     torch.zeros(2, 1, dtype=torch.int32), 1)  # fmt: skip
        self.refuses("probs", ops.moe_token_unpermute, zeros(4, 2),
                     torch.arange(4, dtype=torch.int32), zeros(3, 1))  # fmt: skip
        self.refuses("cross-entropy: hidden", ops.linear_cross_entropy, zeros(2, 4), zeros(5, 3),
                     torch.zeros(2, dtype=torch.long))  # fmt: skip
        self.refuses("exp_avgs", ops.adam_w, [zeros(2)], [zeros(2)], [], [zeros(2)], 1, lr=0.1)
        self.refuses("adam_w: step", ops.adam_w, *([zeros(2)] for _ in range(4)), 0, lr=0.1)

    def test_what_is_not_supported_is_named(self):
        q, k = torch.zeros(1, 3, 2, 32), torch.zeros(1, 3, 1, 32)
        indices = torch.zeros(1, 3, 1, 2, dtype=torch.int32)

        def attend(value=None, **options):
            return ops.sparse_flash_attention(q, k, value, indices, 1.0, **options)

        self.refuses("sparse_mode is 0", attend, sparse_mode=0)
        self.refuses("pre_tokens", attend, pre_tokens=4)
        self.refuses("block_table", attend, block_table=indices)
        self.refuses("sinks", attend, sinks=q)
        self.refuses("attention_mode and value", attend, attention_mode=0)
        self.refuses("attention_mode and value", attend, torch.zeros_like(k))
        self.refuses("sparse_block_size is 2", attend, sparse_block_size=2)
        self.refuses("query_rope and key_rope", attend, query_rope=q)
        self.refuses("'BSND' and 'TND' differ", attend, layout_kv="TND")
        self.refuses("sparse_indices", ops.sparse_flash_attention, q, k, None, indices[0], 1.0)
        weights = torch.zeros(1, 3, 2)
        self.refuses("expected one head", ops.lightning_indexer, q, q, weights)
        self.refuses("ends of documents", ops.lightning_indexer, q[0], k[0], weights[0],
                     layout_query="TND", layout_key="TND",
                     actual_seq_lengths_query=torch.tensor([4]))  # fmt: skip
        statistics = torch.zeros(1, 1, 3, 2)
        self.refuses("softmax_max", ops.sparse_attention_head_sum, q, k, indices,
                     statistics[..., :1], statistics, 1.0)  # fmt: skip


class Others(TestCase):
    def test_the_example_of_the_documentation(self):
        page = (Path(__file__).parents[3] / "docs/operators.md").read_text()
        example = page.split("```python\n")[1].split("```")[0]
        names = {}
        exec(example.replace("build/release/longhaul/ops/liblonghaul_ops.so", LIBRARY), names)
        self.assertEqual(tuple(names["out"].shape), (4096, 16, 512))
        self.assertTrue(names["query"].grad.isfinite().all())
        self.assertTrue(names["loss"].isfinite().all())

    def test_bfloat16_and_meta(self):
        x, weight = random(6, 128, dtype=torch.bfloat16), random(128, dtype=torch.bfloat16)
        y, _ = ops.rms_norm(x, weight)
        self.assertEqual(y.dtype, torch.bfloat16)
        expected = plain.rms_norm(x.double(), weight.double())
        self.assertLess((y.double() - expected).abs().max() / expected.abs().max(), 2**-7)
        meta, _ = ops.rms_norm(x.detach().to("meta"), weight.detach().to("meta"))
        self.assertEqual((meta.device.type, meta.shape, meta.dtype), ("meta", y.shape, y.dtype))


if __name__ == "__main__":
    LIBRARY = sys.argv.pop(1)
    torch.ops.load_library(LIBRARY)
    unittest.main()
