"""Every operator of torch.ops.longhaul that computes in bf16: values and gradients against the same
operator in fp32 on the same numbers. Operands are exact in both, so what differs is the rounding of
results and, in some, of what goes into a product."""

import torch
from support import (
    SCALE,
    Sequences,
    TestCase,
    attention_inputs,
    constant,
    dense_inputs,
    index_inputs,
    random,
)

ops = torch.ops.longhaul
BF16 = torch.bfloat16
ROUNDING = 2**-8  # of a number to bf16, at most


class BFloat16(TestCase):
    def agrees(self, operator, inputs, roundings=2, dtypes=(BF16,)):
        """Outputs of these dtypes (the last one goes on) and gradients, each within some roundings
        of its largest element; what is fp32 in both is compared as fp32."""
        inputs = [x.detach().requires_grad_() for x in inputs]
        wide = [x.detach().float().requires_grad_() for x in inputs]
        found, expected = (self.outputs(operator(*x)) for x in (inputs, wide))
        for i, (x, y) in enumerate(zip(found, expected, strict=True)):
            self.assertEqual(x.dtype, dtypes[min(i, len(dtypes) - 1)])
            self.near(x, y, roundings)
        self.assertTrue(any(x.requires_grad for x in found))
        for x, y in zip(*map(self.gradients, (found, expected), (inputs, wide)), strict=True):
            self.near(x, y, roundings)
        for x, leaf in zip(self.gradients(found, inputs), inputs, strict=True):
            self.assertEqual(x.dtype, leaf.dtype)

    @staticmethod
    def outputs(result):
        return result if isinstance(result, tuple) else (result,)

    @staticmethod
    def gradients(outputs, inputs):
        """For gradients of the outputs that are exact in bf16."""
        outputs = [x for x in outputs if x.requires_grad]
        d = [((torch.arange(x.numel()) % 13 - 6) / 4).view(x.shape).to(x.dtype) for x in outputs]
        return torch.autograd.grad(outputs, inputs, d, retain_graph=True)

    def near(self, actual, expected, roundings):
        self.assertEqual(actual.shape, expected.shape)
        error = (actual.double() - expected.double()).abs().max().item()
        largest = expected.double().abs().max().item()
        self.assertGreater(largest, 0)
        self.assertLess(error / largest, roundings * ROUNDING)

    def test_norms(self):
        x, residual = (random(3, 5, 96, dtype=BF16, seed=i) for i in (0, 1))
        weight = random(96, dtype=BF16)
        self.agrees(lambda x, w: ops.rms_norm(x, w)[0], (x, weight), roundings=3)
        # The sum is rounded before it is normalised; gradients are added after their rounding.
        self.agrees(lambda a, b, w: ops.add_rms_norm(a, b, w)[::2], (x, residual, weight),
                    roundings=5)  # fmt: skip

    def test_swiglu(self):
        for shape, dim in (((7, 130), -1), ((3, 4, 10), 1), ((40, 8192), -1)):
            self.agrees(lambda x, dim=dim: ops.swiglu(x, dim), (random(*shape, dtype=BF16),))

    def test_rotary_mul(self):
        for mode in ("half", "interleave"):
            angle = constant(2, 5, 1, 8) * 3
            angle = torch.cat([angle] * 2, -1) if mode == "half" else angle.repeat_interleave(2, -1)
            cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
            self.agrees(
                lambda x, cos=cos, sin=sin, mode=mode: ops.rotary_mul(
                    x, cos.to(x.dtype), sin.to(x.dtype), mode
                ),
                (random(2, 5, 3, 16, dtype=BF16),),
            )

    def test_attention(self):
        for layout in ("BSND", "TND"):
            s = Sequences(layout)
            indices = s.indices(7)
            lengths = s.tensor_lengths("actual_seq_lengths_query", "actual_seq_lengths_kv")
            options = lengths | {"layout_query": layout, "layout_kv": layout}
            for form in ("absorbed", "expanded"):
                query, key, value, query_rope, key_rope = dense_inputs(s, BF16, form)
                given = [x for x in (query, key, value, query_rope, key_rope) if x is not None]

                def named(x, form=form):
                    query, key, *rest = x
                    value, query_rope, key_rope = rest if form == "expanded" else (None, *rest)
                    return (query, key, value), {"query_rope": query_rope, "key_rope": key_rope}

                def dense(*x, named=named, options=options):
                    operands, ropes = named(x)
                    return ops.flash_attention(*operands, SCALE, **ropes, **options)[0]

                def sparse(*x, named=named, options=options, form=form, indices=indices):
                    operands, ropes = named(x)
                    return ops.sparse_flash_attention(
                        *operands, indices, SCALE, attention_mode=0 if form == "expanded" else 2,
                        **ropes, **options,
                    )[0]  # fmt: skip

                for operator in (dense, sparse):
                    with self.subTest(layout=layout, form=form, operator=operator.__name__):
                        self.agrees(operator, given, roundings=3)

    def test_head_sums(self):
        """Made of what the attention saved, which is fp32 in both."""
        s = Sequences("TND")
        query, key, query_rope, key_rope = (x.detach() for x in attention_inputs(s, BF16))
        indices, ends = s.indices(7), torch.tensor(s.ends)

        def sums(query, key, query_rope, key_rope):
            ropes = {"query_rope": query_rope, "key_rope": key_rope}
            _, *statistics = ops.sparse_flash_attention(
                query, key, None, indices, SCALE, **ropes, layout_query="TND", layout_kv="TND",
                actual_seq_lengths_query=ends, return_softmax_lse=True,
            )  # fmt: skip
            _, *dense = ops.flash_attention(
                query, key, None, SCALE, **ropes, layout_query="TND", layout_kv="TND",
                actual_seq_lengths_query=ends, return_softmax_lse=True,
            )  # fmt: skip
            return (
                ops.sparse_attention_head_sum(
                    query, key, indices, *statistics, SCALE, **ropes, layout="TND"
                ),
                ops.dense_attention_head_sum(
                    query, key, *dense, SCALE, **ropes, layout="TND", actual_seq_klen=s.ends
                ),
            )

        operands = query, key, query_rope, key_rope
        for x, y in zip(sums(*operands), sums(*(x.float() for x in operands)), strict=True):
            self.assertEqual(x.dtype, torch.float32)
            self.near(x, y, 0.01)

    def test_lightning_indexer(self):
        for layout in ("BSND", "TND"):
            s = Sequences(layout)
            lengths = s.tensor_lengths("actual_seq_lengths_query", "actual_seq_lengths_key")

            def select(*x, s=s, lengths=lengths):
                return ops.lightning_indexer(
                    *x, layout_query=s.layout, layout_key=s.layout, sparse_count=9,
                    return_value=True, **lengths,
                )  # fmt: skip

            inputs = index_inputs(s, BF16)
            self.agrees(lambda *x, select=select: select(*x)[1], inputs, dtypes=(torch.float32,))
            wide = [x.detach().float() for x in inputs]
            self.assertTrue(torch.equal(select(*inputs)[0], select(*wide)[0]))

    def test_indexer_losses(self):
        """Their gradients are results."""
        for layout in ("BSND", "TND"):
            s = Sequences(layout)
            attention = [x.detach() for x in attention_inputs(s, BF16)]
            index = [x.detach() for x in index_inputs(s, BF16)]
            wide = [x.float() for x in attention], [x.float() for x in index]
            for losses in (self.sparse_losses, self.dense_losses):
                found, expected = losses(s, attention, index), losses(s, *wide)
                for x, y in zip(found, expected, strict=True):
                    with self.subTest(layout=layout, losses=losses.__name__):
                        self.near(x, y, 3)
                for x, y in zip(found[:3], index, strict=True):
                    self.assertEqual(x.dtype, y.dtype)

    def sparse_losses(self, s, attention, index):
        q, k, query_rope, key_rope = attention
        ropes, indices = {"query_rope": query_rope, "key_rope": key_rope}, s.indices(7)
        _, *statistics = ops.sparse_flash_attention(
            q, k, None, indices, SCALE, **ropes, layout_query=s.layout, layout_kv=s.layout,
            return_softmax_lse=True, actual_seq_lengths_query=torch.tensor(s.ends),
        )  # fmt: skip
        head_sum = ops.sparse_attention_head_sum(
            q, k, indices, *statistics, SCALE, **ropes, layout=s.layout
        )
        return (
            *ops.sparse_lightning_indexer_grad_kl_loss(
                q, k, *index, indices, *statistics, SCALE, **ropes, **s.int_lengths()
            ),
            *ops.sparse_lightning_indexer_kl_loss_from_head_sum(
                *index, indices, head_sum, layout=s.layout
            ),
        )

    def dense_losses(self, s, attention, index):
        q, k, query_rope, key_rope = attention
        ropes = {"query_rope": query_rope, "key_rope": key_rope}
        lengths = s.tensor_lengths("actual_seq_lengths_query", "actual_seq_lengths_kv")
        _, *statistics = ops.flash_attention(
            q, k, None, SCALE, **ropes, layout_query=s.layout, layout_kv=s.layout,
            return_softmax_lse=True, **lengths,
        )  # fmt: skip
        of_index = ops.dense_lightning_indexer_softmax_lse(*index, **s.int_lengths())
        keys = {"layout": s.layout, "actual_seq_klen": s.ends}
        head_sum = ops.dense_attention_head_sum(q, k, *statistics, SCALE, **ropes, **keys)
        return (
            *ops.dense_lightning_indexer_grad_kl_loss(
                q, k, *index, *statistics, *of_index, SCALE, **ropes, **s.int_lengths()
            ),
            *ops.dense_lightning_indexer_kl_loss_from_head_sum(
                *index, head_sum, *of_index, **keys
            ),
        )

    def test_gating(self):
        """Scores and weights are fp32 whatever the logits are: only the gradient is rounded."""
        self.agrees(
            lambda x: ops.moe_gating_top_k(x, 2, norm_type=1, out_flag=True)[::2],
            (random(50, 8, dtype=BF16),), dtypes=self.dtypes_of_gating(),
        )  # fmt: skip

    @staticmethod
    def dtypes_of_gating():
        weights, _, scores = ops.moe_gating_top_k(
            constant(2, 8, dtype=BF16), 2, norm_type=1, out_flag=True
        )
        return weights.dtype, scores.dtype

    def test_permutation(self):
        _, experts, _ = ops.moe_gating_top_k(random(50, 8), 2, norm_type=1)
        tokens, probs = random(50, 24, dtype=BF16), random(50, 2)
        _, rows = ops.moe_token_permute(tokens, experts)
        self.agrees(lambda x: ops.moe_token_permute(x, experts)[0], (tokens,))
        permuted = random(100, 24, dtype=BF16, seed=1)
        self.agrees(lambda x, p: ops.moe_token_unpermute(x, rows, p), (permuted, probs))
        self.agrees(lambda x: ops.moe_token_unpermute(x, rows), (permuted,))

    def test_grouped_matmul(self):
        counts = torch.tensor([7, 0, 30, 3])
        for n, k in ((64, 32), (1, 7), (33, 250)):
            self.agrees(
                lambda x, w: ops.grouped_matmul(x, w, counts),
                (random(40, k, dtype=BF16), random(4, n, k, dtype=BF16)),
            )

    def test_linear_cross_entropy(self):
        labels = torch.arange(30) * 3
        labels[::7] = -100
        # Logits, their gradient and its products are rounded.
        self.agrees(
            lambda h, w: ops.linear_cross_entropy(h, w, labels),
            (random(30, 32, dtype=BF16), random(100, 32, dtype=BF16)),
            roundings=4, dtypes=(torch.float32,),
        )  # fmt: skip

    def test_adam_w(self):
        """In place; a parameter in fp32 stands among those in bf16."""
        shapes = (5, 7), (100,), (3, 333)
        lists = [
            [constant(*shape, dtype=BF16, seed=i).abs() for shape in shapes] for i in range(4)
        ]
        wide = [[x.float() for x in one] for one in lists]
        for one in lists:
            one.append(torch.ones(9))
        for given in (lists, wide):
            ops.adam_w(*given, 3, lr=0.1)
        for i in (0, 2, 3):
            for x, y in zip(lists[i], wide[i], strict=False):
                self.assertEqual(x.dtype, BF16)
                self.near(x, y, 2)
        self.assertEqual(lists[0][3].dtype, torch.float32)
        self.assertLess(lists[0][3].max().item(), 1)
