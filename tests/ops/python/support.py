"""What the tests of the operators share: inputs in both layouts, and comparisons."""

import unittest

import definitions as plain
import torch

SCALE = 0.125  # of the attention


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

    def statistics_by_head(self, x):
        """[T, H] as [B, H, S, 1], or [H, T, 1], for keys of each head."""
        return x.view(*self.shape, -1).transpose(-1, -2).unsqueeze(-1)

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


def dense_inputs(s, dtype, form):
    """query, key, value, query_rope, key_rope of an attention of 4 heads; odd widths."""
    heads = 4 if form == "expanded" else 1
    query, value = s.random(4, 40, dtype=dtype), s.random(heads, 24, dtype=dtype, seed=3)
    key = s.random(heads, 40, dtype=dtype, seed=1)
    ropes = s.random(4, 8, dtype=dtype, seed=2), s.random(heads, 8, dtype=dtype, seed=4)
    return query, key, None if form == "absorbed" else value, *ropes


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
