"""liblonghaul_ops.so in an ordinary PyTorch process: every operator of torch.ops.longhaul, forward
and gradients, against a few lines of plain PyTorch.

    library_test.py path/to/liblonghaul_ops.so
"""

import sys
import unittest
from pathlib import Path

import torch

ops = torch.ops.longhaul


def random(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def gradients(outputs, inputs):
    """Of a weighted sum of the outputs, so that no element's gradient is the same as another's."""
    total = sum((o.float() * torch.linspace(-1, 2, o.numel()).view(o.shape)).sum() for o in outputs)
    return torch.autograd.grad(total, inputs)


class Operators(unittest.TestCase):
    def close(self, actual, expected, tolerance=1e-5):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    def same(self, ours, plain, inputs, tolerance=1e-5):
        a, b = ours(*inputs), plain(*inputs)
        a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
        for x, y in zip(a, b, strict=True):
            self.close(x, y, tolerance)
        for x, y in zip(gradients(a, inputs), gradients(b, inputs), strict=True):
            self.close(x, y, 10 * tolerance)

    def test_rms_norm(self):
        def plain(x, weight):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight

        x, residual, weight = random(3, 5, 96), random(3, 5, 96, seed=1), random(96)
        self.same(ops.rms_norm, plain, (x, weight))
        self.same(
            lambda a, b, w: ops.add_rms_norm(a, b, w),
            lambda a, b, w: (plain(a + b, w), a + b),
            (x, residual, weight),
        )

    def test_swiglu(self):
        def plain(x):
            gate, up = x.chunk(2, -1)
            return torch.nn.functional.silu(gate) * up

        self.same(ops.swiglu, plain, (random(7, 130),))

    def test_rotary_mul(self):
        x = random(2, 5, 3, 16)
        angle = torch.rand(2, 5, 1, 8) * 6
        for mode, double in (
            ("half", lambda a: torch.cat([a, a], -1)),
            ("interleave", lambda a: a.repeat_interleave(2, -1)),
        ):
            cos, sin = double(angle.cos()), double(angle.sin())

            def plain(x, mode=mode, cos=cos, sin=sin):
                if mode == "half":
                    turned = torch.cat([-x[..., 8:], x[..., :8]], -1)
                else:
                    turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
                return x * cos + turned * sin

            self.same(
                lambda x, mode=mode, cos=cos, sin=sin: ops.rotary_mul(x, cos, sin, mode),
                plain,
                (x,),
            )

    def visible(self, ends):
        """[T, T]: causal, and within the documents that end at `ends`."""
        document = torch.bucketize(torch.arange(ends[-1]), torch.tensor(ends), right=True)
        same = document[:, None] == document[None, :]
        return same & torch.ones(ends[-1], ends[-1], dtype=torch.bool).tril()

    def selection(self, query, key, weights, visible, k):
        scores = torch.einsum("tjd,sd->tjs", query, key).relu().mul(weights[..., None]).sum(1)
        scores = scores.masked_fill(~visible, -torch.inf)
        keep = min(k, scores.shape[1])
        chosen = torch.zeros_like(visible).scatter_(1, scores.topk(keep).indices, True)
        return chosen & visible

    def mask_of(self, indices, keys):
        """[T, K] indices with -1 for none as a mask [T, keys]."""
        wide = torch.zeros(indices.shape[0], keys + 1, dtype=torch.bool)
        index = torch.where(indices < 0, keys, indices).long()
        return wide.scatter_(1, index, True)[:, :keys]

    def test_lightning_indexer(self):
        query, key = random(37, 4, 32).detach(), random(37, 1, 32).detach()
        weights = random(37, 4).detach()
        for ends in ([37], [1, 12, 20, 37]):
            expected = self.selection(query, key[:, 0], weights, self.visible(ends), 8)
            indices, values = ops.lightning_indexer(
                query,
                key,
                weights,
                actual_seq_lengths_query=torch.tensor(ends),
                layout_query="TND",
                layout_key="TND",
                sparse_count=8,
                return_value=True,
            )
            self.assertEqual(tuple(indices.shape), (37, 1, 8))
            self.assertEqual(tuple(values.shape), (37, 1, 8))
            self.assertTrue(torch.equal(self.mask_of(indices[:, 0], 37), expected))
        # The same in rows, and more keys asked for than there are.
        indices, _ = ops.lightning_indexer(query[None], key[None], weights[None], sparse_count=50)
        self.assertEqual(tuple(indices.shape), (1, 37, 1, 50))
        self.assertTrue(torch.equal(self.mask_of(indices[0, :, 0], 37), self.visible([37])))

    def test_sparse_flash_attention(self):
        T, H, D, R, ends = 33, 4, 64, 32, [5, 33]
        query, query_rope = random(T, H, D), random(T, H, R)
        key, key_rope = random(T, 1, D), random(T, 1, R)
        visible = self.visible(ends)
        chosen = visible & (torch.rand(T, T) < 0.5) | torch.eye(T, dtype=torch.bool)
        most = int(chosen.sum(1).max())
        indices = torch.full((T, 1, most), -1, dtype=torch.int32)
        for t in range(T):
            found = chosen[t].nonzero()[:, 0]
            indices[t, 0, : len(found)] = found.int()

        def plain(query, query_rope, key, key_rope):
            q, k = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1)[:, 0]
            scores = torch.einsum("thd,sd->hts", q, k) * 0.125
            p = scores.masked_fill(~chosen, -torch.inf).softmax(-1)
            return torch.einsum("hts,sd->thd", p, key[:, 0])

        def ours(query, query_rope, key, key_rope):
            out, _, _ = ops.sparse_flash_attention(
                query,
                key,
                None,
                indices,
                0.125,
                query_rope=query_rope,
                key_rope=key_rope,
                actual_seq_lengths_query=torch.tensor(ends),
                layout_query="TND",
                layout_kv="TND",
            )
            return out

        self.same(ours, plain, (query, query_rope, key, key_rope))
        rows, maximum, total = ops.sparse_flash_attention(
            query[None], key[None], None, indices[None], 0.125, return_softmax_lse=True
        )
        self.assertEqual(tuple(rows.shape), (1, T, H, D))
        scores = torch.einsum("thd,sd->hts", query, key[:, 0]) * 0.125
        lse = scores.masked_fill(~chosen, -torch.inf).logsumexp(-1)
        self.close((maximum + total.log())[0, 0].T, lse)

    def test_routing(self):
        logits = random(50, 8)

        def plain(logits):
            scores = logits.sigmoid()
            weights, _ = scores.topk(2)
            return 2.5 * weights / weights.sum(-1, keepdim=True)

        def ours(logits):
            return ops.moe_gating_top_k(logits, 2, norm_type=1, routed_scaling_factor=2.5)[0]

        self.same(ours, plain, (logits,))
        _, experts, _ = ops.moe_gating_top_k(logits, 2, norm_type=1)
        self.assertTrue(torch.equal(experts.long(), logits.sigmoid().topk(2).indices))

        tokens, probs = random(50, 24), torch.rand(50, 2).requires_grad_()
        permuted, rows = ops.moe_token_permute(tokens, experts)
        order = experts.flatten().long().argsort(stable=True)
        self.assertTrue(torch.equal(permuted, tokens[order // 2]))
        self.same(
            lambda x, p: ops.moe_token_unpermute(ops.moe_token_permute(x, experts)[0], rows, p),
            lambda x, p: x * p.sum(-1, keepdim=True),
            (tokens, probs),
        )

        # In fp64 the plain definition computes.
        wide = permuted.detach().double()
        self.close(
            ops.moe_token_unpermute(wide, rows, probs.double()).float(),
            ops.moe_token_unpermute(permuted, rows, probs),
        )

    def test_grouped_matmul(self):
        x, weight = random(40, 16), random(4, 24, 16)
        counts = torch.tensor([7, 0, 30, 3])

        def plain(x, weight):
            parts = x.split(counts.tolist())
            return torch.cat([part @ w.T for part, w in zip(parts, weight, strict=True)])

        self.same(lambda x, w: ops.grouped_matmul(x, w, counts), plain, (x, weight))

    def test_linear_cross_entropy(self):
        labels = torch.randint(0, 100, (30,))
        labels[::7] = -100
        self.same(
            lambda h, w: ops.linear_cross_entropy(h, w, labels),
            lambda h, w: torch.nn.functional.cross_entropy(h @ w.T, labels, reduction="sum"),
            (random(30, 32), random(100, 32)),
        )

    def test_the_example_of_the_documentation(self):
        page = (Path(__file__).parents[3] / "docs/operators.md").read_text()
        example = page.split("```python\n")[1].split("```")[0]
        names = {}
        exec(example.replace("build/release/longhaul/ops/liblonghaul_ops.so", LIBRARY), names)
        self.assertEqual(tuple(names["out"].shape), (4096, 16, 512))
        self.assertTrue(names["query"].grad.isfinite().all())

    def test_bfloat16_and_meta(self):
        x, weight = random(6, 128, dtype=torch.bfloat16), random(128, dtype=torch.bfloat16)
        y = ops.rms_norm(x, weight)
        self.assertEqual(y.dtype, torch.bfloat16)
        self.close(y.float(), ops.rms_norm(x.float(), weight.float()), 2e-2)
        meta = ops.rms_norm(x.detach().to("meta"), weight.detach().to("meta"))
        self.assertEqual((meta.device.type, meta.shape, meta.dtype), ("meta", y.shape, y.dtype))

    def test_what_does_not_fit_is_named(self):
        with self.assertRaisesRegex(RuntimeError, "layout 'SBH'"):
            ops.lightning_indexer(
                torch.zeros(2, 3, 4), torch.zeros(2, 3, 1), torch.zeros(2, 3),
                layout_query="SBH", layout_key="SBH",
            )
        with self.assertRaisesRegex(RuntimeError, "rms_norm: weight"):
            ops.rms_norm(torch.zeros(2, 8), torch.zeros(9))


if __name__ == "__main__":
    LIBRARY = sys.argv.pop(1)
    torch.ops.load_library(LIBRARY)
    unittest.main()
