"""Every operator of torch.ops.longhaul against its definition in plain PyTorch (definitions.py),
forward and gradients, in both layouts, in fp32 through the kernels and in fp64."""

import definitions as plain
import torch
from support import (
    SCALE,
    Sequences,
    TestCase,
    attention_inputs,
    constant,
    dense_inputs,
    in_both_layouts,
    index_inputs,
    joined,
    random,
)

ops = torch.ops.longhaul


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
            for shape, of_angles in (
                ((2, 5, 3, 16), (2, 5, 1, 8)),
                ((2, 5, 3, 16), (1, 5, 1, 8)),  # for all rows
                ((1, 5, 3, 16), (1, 5, 1, 8)),
                ((9, 3, 16), (9, 1, 8)),
            ):
                angle = constant(*of_angles, dtype=dtype) * 3
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
            return plain.attention(q, k, s.flat(key)[:, 0], mask, SCALE).view(query.shape)

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
                q, k, None, indices, SCALE, layout_query="TND", layout_kv="TND",
                actual_seq_lengths_query=torch.tensor(s.ends),
            )[0],
            lambda q, k: plain.attention(q, k[:, 0], k[:, 0], s.mask, SCALE),
            (query, key),
        )  # fmt: skip

    def compare(self, s, inputs, mask, attend):
        """attend(query, key, value, query_rope, key_rope, **options) against the definition, with
        gradients and statistics."""
        dtype, has_value = inputs[0].dtype, inputs[2] is not None
        shared = inputs[1].shape[-2] == 1

        def arguments(x):  # with the value that is not there
            return x if has_value else (*x[:2], None, *x[2:])

        def of_definition(*x):
            query, key, value, query_rope, key_rope = arguments(x)
            key, q = joined(s, key, key_rope), joined(s, query, query_rope)
            value = s.flat(x[1] if value is None else value)
            return q, *((key[:, 0], value[:, 0]) if shared else (key, value))

        def definition(*x):
            out = plain.attention(*of_definition(*x), mask, SCALE)
            return out.view(*x[0].shape[:-1], -1)

        given = [x for x in inputs if x is not None]
        self.same(lambda *x: attend(*arguments(x))[0], definition, given)
        _, maximum, total = attend(*inputs, return_softmax_lse=True)
        q, k, _ = of_definition(*(x.detach().double() for x in given))
        p, lse = plain.probabilities(q, k, mask, SCALE)
        as_statistics = s.statistics if shared else s.statistics_by_head
        self.close(
            (maximum + total.log()).nan_to_num(neginf=0),
            as_statistics(lse).nan_to_num(neginf=0), dtype,
        )  # fmt: skip
        return p, maximum, total

    @in_both_layouts
    def test_flash_attention(self, s, dtype):
        for form in ("absorbed", "shared", "expanded"):

            def attend(query, key, value, query_rope, key_rope, **options):
                return ops.flash_attention(
                    query, key, value, SCALE, query_rope=query_rope, key_rope=key_rope,
                    layout_query=s.layout, layout_kv=s.layout,
                    **s.tensor_lengths("actual_seq_lengths_query", "actual_seq_lengths_kv"),
                    **options,
                )  # fmt: skip

            self.compare(s, dense_inputs(s, dtype, form), s.mask, attend)

    def test_flash_attention_without_rope(self):
        x = random(1, 9, 2, 16), random(1, 9, 2, 16, seed=1), random(1, 9, 2, 16, seed=2)
        mask = plain.visible(torch.zeros(9, dtype=torch.long))
        self.same(
            lambda q, k, v: ops.flash_attention(q, k, v, SCALE)[0],
            lambda q, k, v: plain.attention(q[0], k[0], v[0], mask, SCALE)[None],
            x,
        )

    @in_both_layouts
    def test_sparse_flash_attention_with_keys_of_each_head(self, s, dtype):
        inputs, indices = dense_inputs(s, dtype, "expanded"), s.indices(7)

        def attend(query, key, value, query_rope, key_rope, **options):
            return ops.sparse_flash_attention(
                query, key, value, indices, SCALE, query_rope=query_rope, key_rope=key_rope,
                layout_query=s.layout, layout_kv=s.layout, attention_mode=0,
                **s.tensor_lengths("actual_seq_lengths_query", "actual_seq_lengths_kv"),
                **options,
            )  # fmt: skip

        p, maximum, total = self.compare(s, inputs, s.mask_of(indices), attend)
        head_sum = ops.sparse_attention_head_sum(
            inputs[0], inputs[1], indices, maximum, total, SCALE,
            query_rope=inputs[3], key_rope=inputs[4], layout=s.layout,
        )  # fmt: skip
        expected = s.by_row(p.sum(1)).gather(-1, indices.long().clamp_min(0))
        self.close(head_sum, expected.masked_fill(indices < 0, 0), dtype)

    def test_the_last_queries_of_a_sequence(self):
        """Fewer queries than keys: a shard of the positions."""
        s = Sequences("TND")
        indices, q, k = s.indices(7), s.random(4, 32).detach(), s.random(1, 32, seed=1).detach()
        options = {
            "layout_query": "TND",
            "layout_kv": "TND",
            "actual_seq_lengths_kv": torch.tensor(s.ends),
        }
        whole, *_ = ops.sparse_flash_attention(q, k, None, indices, SCALE, **options)
        part, *_ = ops.sparse_flash_attention(q[20:], k, None, indices[20:], SCALE, **options)
        self.assertTrue(torch.equal(part, whole[20:]))

    def test_bfloat16(self):
        """Each result and gradient is rounded once, what it is made of up to three times."""
        s = Sequences("TND")
        ends = {"actual_seq_lengths_kv": torch.tensor(s.ends)}
        layouts = {"layout_query": "TND", "layout_kv": "TND"}
        indices = s.indices(7)
        for form in ("absorbed", "expanded"):
            inputs = dense_inputs(s, torch.bfloat16, form)
            given = [x for x in inputs if x is not None]
            wide = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
            mode = {"attention_mode": 0 if form == "expanded" else 2}

            def attend(query, key, value, *ropes):
                ropes = dict(zip(("query_rope", "key_rope"), ropes, strict=True))
                common = ropes | ends | layouts
                return (
                    ops.flash_attention(query, key, value, SCALE, **common)[0],
                    ops.sparse_flash_attention(
                        query, key, value, indices, SCALE, **common, **mode
                    )[0],
                )

            a, b = attend(*inputs), attend(*wide)
            wide = [x for x in wide if x is not None]
            for x, y in zip(a, b, strict=True):
                self.assertEqual(x.dtype, torch.bfloat16)
                found = [x, *torch.autograd.grad(x.double().square().sum(), given)]
                expected = [y, *torch.autograd.grad(y.square().sum(), wide)]
                for one, other in zip(found, expected, strict=True):
                    error = (one.double() - other).abs().max() / other.abs().max()
                    self.assertLess(error, 4 * 2**-8)

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
            as_statistics = s.statistics if heads == 1 else s.statistics_by_head
            maximum, total = as_statistics(maximum), as_statistics(total)
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
            actual_seq_lengths_query=torch.tensor(s.ends),
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
            for n, k in ((64, 32), (1, 7), (33, 250)):
                self.same(
                    lambda x, w: ops.grouped_matmul(x, w, counts),
                    lambda x, w: plain.grouped_matmul(x, w, counts),
                    (random(40, k, dtype=dtype), random(4, n, k, dtype=dtype)),
                )

    def test_grouped_matmul_as_ascend_calls_it(self):
        """The same numbers and gradients, in both forms of the list of groups; the last two rows
        belong to no group."""
        counts = torch.tensor([7, 0, 28, 3])
        x, weight = random(40, 32), random(4, 32, 65)
        expected = ops.grouped_matmul(x, weight.transpose(1, 2), counts)
        d = constant(*expected.shape)
        wanted = torch.autograd.grad(expected, (x, weight), d)
        for group_list, kind in ((counts.cumsum(0), 0), (counts, 1), (counts.cumsum(0).int(), 0)):
            with self.subTest(kind=kind, dtype=group_list.dtype):
                results = ops.grouped_matmul(
                    [x], [weight], group_list=group_list, split_item=2, group_type=0,
                    group_list_type=kind,
                )  # fmt: skip
                self.assertEqual(len(results), 1)
                found = torch.autograd.grad(results[0], (x, weight), d)
                for one, other in zip((*results, *found), (expected, *wanted), strict=True):
                    self.assertTrue(torch.equal(one, other))
        self.assertFalse(expected[:38].eq(0).all(1).any())
        self.assertTrue(expected[38:].eq(0).all())


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
            with self.assertRaisesRegex(RuntimeError, "expected create_graph=False"):
                loss = ops.linear_cross_entropy(hidden, weight, labels)
                torch.autograd.grad(loss.square(), hidden, create_graph=True)
            # Rows of a batch.
            self.same(
                lambda h, w: ops.linear_cross_entropy(h.view(2, 15, 32), w, labels.view(2, 15)),
                definition,
                (hidden, weight),
            )

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
