"""The registration of the operators (schema, autograd, fake tensors, tracing), a compiled training
step, errors, and the example of docs/operators.md."""

import os
import tempfile
from pathlib import Path

import definitions as plain
import support
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
from torch.testing._internal.optests import aot_autograd_check

ops = torch.ops.longhaul


def samples():
    """Arguments for each operator, in both layouts where it has one."""
    x, weight, gate = random(3, 5, 64), random(64), random(6, 20)
    _, rstd = ops.rms_norm(x.detach(), weight.detach())
    angle = constant(2, 5, 1, 8)
    r, interleaved = torch.cat([angle, angle], -1), angle.repeat_interleave(2, -1)
    turned = random(2, 5, 3, 16)
    yield "rms_norm", (x, weight)
    yield "rms_norm_backward", (x.detach(), x.detach(), weight.detach(), rstd)
    yield "add_rms_norm", (x, random(3, 5, 64, seed=1), weight)
    yield "add_rms_norm_backward", (x.detach(), x.detach(), weight.detach(), rstd, x.detach())
    yield "rotary_mul", (turned, r, r)
    yield (
        "rotary_mul",
        (turned, interleaved.clone().requires_grad_(), interleaved, "interleave"),
    )
    for_all_rows = r[:1].clone()
    yield "rotary_mul", (turned, for_all_rows.requires_grad_(), for_all_rows.detach())
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
    yield (
        "grouped_matmul.list",
        ([matmul[0]], [random(4, 32, 64)]),
        {"group_list": counts.cumsum(0), "split_item": 2, "group_type": 0},
    )
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
    yield "sparse_flash_attention", (query, key, None, indices, SCALE), lengths | in_layout
    yield from samples_of_attention(s, indices, lengths | in_layout)
    query, key, query_rope, key_rope = (x.detach() for x in attention)
    ropes = {"query_rope": query_rope, "key_rope": key_rope}
    out, *statistics = ops.sparse_flash_attention(
        query, key, None, indices, SCALE, **ropes, **lengths, **in_layout, return_softmax_lse=True
    )
    yield (
        "sparse_flash_attention_grad",
        (query, key, None, indices, out, out, *statistics, SCALE, 1, query_rope, key_rope),
        {"layout": s.layout} | s.tensor_lengths("actual_seq_qlen", "actual_seq_kvlen"),
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
    yield "lightning_indexer_grad", (*index[:2], dy, indices, index[2]), lengths | layout
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
        return_softmax_lse=True, actual_seq_lengths_query=torch.tensor(s.ends),
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


def samples_of_attention(s, indices, options):
    """Dense attention in its forms, and sparse attention with keys of each head."""
    in_layout = {"layout": s.layout} | s.tensor_lengths("actual_seq_qlen", "actual_seq_kvlen")
    with_statistics = options | {"return_softmax_lse": True}
    for form in ("absorbed", "shared", "expanded"):
        query, key, value, *ropes = dense_inputs(s, torch.float32, form)
        ropes = dict(zip(("query_rope", "key_rope"), ropes, strict=True))
        yield "flash_attention", (query, key, value, SCALE), ropes | with_statistics
        yield "flash_attention", (query, key, value, SCALE), options
        query, key, query_rope, key_rope = (
            x.detach() for x in (query, key, *ropes.values())
        )  # fmt: skip
        value = value if value is None else value.detach()
        ropes = {"query_rope": query_rope, "key_rope": key_rope}
        out, *saved = ops.flash_attention(query, key, value, SCALE, **ropes, **with_statistics)
        yield (
            "flash_attention_grad",
            (query, key, value, out, out, *saved, SCALE, query_rope, key_rope),
            in_layout,
        )
    own_keys = {"attention_mode": 0}
    out, *saved = ops.sparse_flash_attention(
        query, key, value, indices, SCALE, **ropes, **with_statistics, **own_keys
    )
    yield (
        "sparse_flash_attention_grad",
        (query, key, value, indices, out, out, *saved, SCALE, 1, query_rope, key_rope),
        in_layout | own_keys,
    )
    leaves = dense_inputs(s, torch.float32, "expanded")
    ropes = {"query_rope": leaves[3], "key_rope": leaves[4]}
    yield (
        "sparse_flash_attention",
        (*leaves[:3], indices, SCALE),
        ropes | with_statistics | own_keys,
    )


class Registration(TestCase):
    def test_every_operator(self):
        names = set()
        for name, arguments, *options in samples():
            names.add(name)
            with self.subTest(name, options=options):
                kwargs = options[0] if options else {}
                packet, _, overload = name.partition(".")
                operator = getattr(getattr(ops, packet), overload or "default")
                torch.library.opcheck(operator, arguments, kwargs)
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
                actual_seq_lengths_query=ends,
            )  # fmt: skip
            *_, kl = ops.sparse_lightning_indexer_grad_kl_loss(
                query.detach(), key.detach(), *index, indices, maximum, total, SCALE,
                query_rope=query_rope, key_rope=key_rope, layout="TND", actual_seq_qlen=s.ends,
            )  # fmt: skip
            dense, *_ = ops.flash_attention(
                query, key, None, SCALE, layout_query="TND", layout_kv="TND",
                actual_seq_lengths_query=ends,
            )  # fmt: skip
            out = (out + dense).flatten(1)
            x, _, residual = ops.add_rms_norm(hidden, out @ wo.T / 16, norm)
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
        self.refuses("layout: expected 'BSND' or 'TND', got 'SBH'", ops.lightning_indexer,
                     zeros(2, 3, 4), zeros(2, 3, 1), zeros(2, 3), layout_query="SBH", layout_key="SBH")  # fmt: skip
        self.refuses("rms_norm: gamma: expected .8., got .9.", ops.rms_norm, zeros(2, 8), zeros(9))
        self.refuses("rms_norm: input: expected at least 1 dimension, got ..", ops.rms_norm,
                     zeros(()), zeros(1))  # fmt: skip
        self.refuses("input: expected floating-point numbers, got Int", ops.rms_norm,
                     zeros(2, 8).int(), zeros(8))  # fmt: skip
        self.refuses("swiglu: input: expected floating-point numbers, got Int", ops.swiglu,
                     zeros(2, 8).int())  # fmt: skip
        self.refuses("swiglu: dim: expected -2 to 1, got 2", ops.swiglu, zeros(2, 8), 2)
        self.refuses("even size in dimension -1, got .2 x 7", ops.swiglu, zeros(2, 7))
        self.refuses("each of 0 to 3 once, got 1 twice", ops.moe_token_unpermute, zeros(4, 8),
                     torch.tensor([0, 1, 1, 3]))  # fmt: skip
        self.refuses("indices: expected 0 to 65535, got 65536", ops.moe_token_permute, zeros(1, 8),
                     torch.tensor([[1, 65536]]))  # fmt: skip
        self.refuses("sparse_indices: expected -1 to 5, got 6", ops.sparse_attention_head_sum,
                     zeros(1, 2, 2, 4), zeros(1, 6, 2, 4), torch.full((1, 2, 1, 1), 6),
                     zeros(1, 2, 2, 1), zeros(1, 2, 2, 1), 1.0)  # fmt: skip
        self.refuses("on one device, got .2 x 8. on cpu", ops.rms_norm, zeros(2, 8),
                     torch.zeros(8, device="meta"))  # fmt: skip
        self.refuses("rotary_mode: expected 'half' or 'interleave', got 'quarter'", ops.rotary_mul,
                     *(zeros(1, 2, 1, 4) for _ in range(3)), "quarter")  # fmt: skip
        logits, experts = zeros(2, 4), torch.zeros(2, 1, dtype=torch.int32)
        gate = ops.moe_gating_top_k
        self.refuses("eps: expected 1e-20, got 0.001", gate, logits, 1, eps=1e-3)
        self.refuses("renorm: expected 0 or 1, got 2", gate, logits, 1, renorm=2)
        self.refuses("norm_type: expected 0 .* or 1 .*, got 2", gate, logits, 1, norm_type=2)
        self.refuses("group_select_mode: expected 1 .*, got 0", gate, logits, 1, group_count=2)
        self.refuses("n_group groups: expected a multiple of 3, got 4", gate, logits, 1,
                     group_count=3, group_select_mode=1)  # fmt: skip
        self.refuses("input_ids is not supported: expected None, got .2 x 1.", gate, logits, 1,
                     input_ids=experts)  # fmt: skip
        self.refuses("num_out_tokens: expected 0 or 2 .*, got 1", ops.moe_token_permute, logits,
                     experts, 1)  # fmt: skip
        self.refuses("padded_mode is not supported: expected False, got True",
                     ops.moe_token_permute, logits, experts, padded_mode=True)  # fmt: skip
        rows = torch.arange(4, dtype=torch.int32)
        self.refuses("restore_shape is not supported: expected None, got .2, 2.",
                     ops.moe_token_unpermute, zeros(4, 2), rows, restore_shape=[2, 2])  # fmt: skip
        self.refuses("probs: expected .T, k. with T k = 4, .*, got .3 x 1.",
                     ops.moe_token_unpermute, zeros(4, 2), rows, zeros(3, 1))  # fmt: skip
        self.refuses("cross-entropy: hidden: expected .2 x 3., got .2 x 4.",
                     ops.linear_cross_entropy, zeros(2, 4), zeros(5, 3),
                     torch.zeros(2, dtype=torch.long))  # fmt: skip
        self.refuses("cross-entropy: labels: expected .2 x 3., got .3 x 2.",
                     ops.linear_cross_entropy, zeros(2, 3, 4), zeros(5, 4),
                     torch.zeros(3, 2, dtype=torch.long))  # fmt: skip
        for dtype in (torch.float32, torch.float64):
            for call in (
                lambda *x: ops.linear_cross_entropy(*x),
                lambda *x: ops.linear_cross_entropy_and_grad(*x, [True, True]),
            ):
                self.refuses("linear_cross_entropy: .* expected -100 or 0 to 4 .*, got 7 in row 1",
                             call, zeros(2, 3, dtype=dtype), zeros(5, 3, dtype=dtype),
                             torch.tensor([0, 7]))  # fmt: skip
        self.refuses("exp_avgs", ops.adam_w, [zeros(2)], [zeros(2)], [], [zeros(2)], 1, lr=0.1)
        self.refuses("adam_w: step", ops.adam_w, *([zeros(2)] for _ in range(4)), 0, lr=0.1)
        self.refuses("on one device, got .2. on cpu", ops.adam_w, [zeros(2)],
                     [torch.zeros(2, device="meta")], [zeros(2)], [zeros(2)], 1, lr=0.1)  # fmt: skip

    def test_angles_that_are_not_those_of_pairs(self):
        x, ones = torch.zeros(2, 3, 5, 4), torch.ones(2, 3, 1, 4)
        wrong = ones.clone()
        wrong[1, 2, 0, 3] = 0.25  # of the pairs (1, 3) and (2, 3)
        for mode in ("half", "interleave"):
            text = "expected the same number for both elements of a pair, got 1 and 0.25 for pair 1"
            self.refuses(f"rotary_mul: r1: {text} of row 2", ops.rotary_mul, x, wrong, ones, mode)
            self.refuses(f"rotary_mul: r2: {text} of row 2", ops.rotary_mul, x, ones, wrong, mode)
            self.refuses(text, ops.rotary_mul, x[1], wrong[1], ones[1], mode)
            self.refuses(text, ops.rotary_mul_backward, x, x, wrong, ones, mode)
        self.refuses("r1: expected .2 x 3 x 1 x 4., got .3 x 3 x 1 x 4.", ops.rotary_mul, x,
                     torch.ones(3, 3, 1, 4), ones)  # fmt: skip
        self.refuses("r1: expected .3 x 1 x 4., got .1 x 1 x 4.", ops.rotary_mul, x[0],
                     ones[0][:1], ones[0])  # fmt: skip
        self.refuses("input: expected 3 or 4 dimensions, the last one even, got .2 x 3 x 5 x 3.",
                     ops.rotary_mul, x[..., :3], ones[..., :3], ones[..., :3])  # fmt: skip

    def test_indices_that_are_no_integers(self):
        zeros, halves = torch.zeros, torch.tensor([0.5, 1.5])
        self.refuses("sorted_indices: expected Int or Long, got Float", ops.moe_token_unpermute,
                     zeros(2, 8), halves)  # fmt: skip
        self.refuses("group_list: expected Int or Long, got Float", ops.grouped_matmul_grad,
                     zeros(2, 3), zeros(2, 4), zeros(2, 3, 4), halves, [True, True])  # fmt: skip
        self.refuses("group_list: expected 1 dimensions, got", ops.grouped_matmul,
                     zeros(2, 4), zeros(2, 3, 4), torch.ones(2, 1, dtype=torch.long))  # fmt: skip
        self.refuses("expertIdx: expected Int or Long, got Float", ops.moe_gating_top_k_backward,
                     zeros(2, 4), zeros(2, 1), halves.unsqueeze(1))  # fmt: skip
        self.refuses("actual_seq_lengths: expected Int or Long, got Float", ops.lightning_indexer,
                     zeros(2, 3, 1, 4), zeros(2, 3, 1, 4), zeros(2, 3, 1),
                     actual_seq_lengths_query=halves, actual_seq_lengths_key=halves)  # fmt: skip

    def test_the_forms_of_grouped_matmul_that_are_not_there(self):
        x, weight = torch.zeros(5, 4), torch.zeros(2, 4, 3)

        def multiply(x=(x,), weight=(weight,), **options):
            given = {"group_list": torch.tensor([2, 5]), "split_item": 2, "group_type": 0} | options
            return ops.grouped_matmul(list(x), list(weight), **given)

        (result,) = multiply(bias=[], scale=None, split_item=3)
        self.assertEqual(tuple(result.shape), (5, 3))
        self.refuses(r"x: expected 1 tensor \[M, K\], got 2 \(\[5 x 4\] and \[5 x 4\]\)", multiply,
                     x=[x, x])  # fmt: skip
        self.refuses(r"weight: expected 1 tensor \[E, K, N\], got 1 \(\[4 x 3\]\)", multiply,
                     weight=[weight[0]])  # fmt: skip
        self.refuses("weight: expected 1 tensor .*, got 0", multiply, weight=[])
        self.refuses("bias .*: expected none, got 1", multiply, bias=[x])
        self.refuses("activation_input .*: expected none, got 2", multiply, activation_input=[x, x])
        self.refuses("output_dtype .*: expected None, got 5", multiply, output_dtype=5)
        self.refuses("act_type: expected 0 .*, got 1", multiply, act_type=1)
        self.refuses("tuning_config .*, got .1, 2.", multiply, tuning_config=[1, 2])
        self.refuses(r"split_item: expected 2 or 3 .*, got 0", multiply, split_item=0)
        self.refuses("group_type: expected 0 .*, got 2", multiply, group_type=2)
        self.refuses("group_type: expected 0 .*, got None", multiply, group_type=None)
        self.refuses("group_list: expected .*, got None", multiply, group_list=None)
        self.refuses("group_list_type: expected 0 .*, got 2", multiply, group_list_type=2)
        # Neither a place before the one before it nor one behind the rows.
        for wrong in ([3, 2], [2, 6]):
            self.refuses("counts", multiply, group_list=torch.tensor(wrong))

    def test_what_is_not_supported_is_named(self):
        q, k = torch.zeros(1, 3, 2, 32), torch.zeros(1, 3, 1, 32)
        indices = torch.tensor([0, -1], dtype=torch.int32).expand(1, 3, 1, 2)

        def attend(value=None, **options):
            return ops.sparse_flash_attention(q, k, value, indices, 1.0, **options)

        self.refuses("sparse_mode: expected 3 .causal., got 0", attend, sparse_mode=0)
        self.refuses("pre_tokens .* expected 9223372036854775807 for both .*, got 4 and 92", attend,
                     pre_tokens=4)  # fmt: skip
        self.refuses("block_table is not supported: expected None, got .1 x 3 x 1 x 2.", attend,
                     block_table=indices)  # fmt: skip
        self.refuses("sinks is not supported: expected None, got .1 x 3 x 2 x 32.", attend, sinks=q)
        of_each = "attention_mode 0: expected a key and a value of each of the query's 2 heads, got"
        self.refuses(f"{of_each} .*, value .none.", attend, attention_mode=0)
        self.refuses(f"{of_each} key .1 x 3 x 1 x 32., value .1 x 3 x 1 x 32.", attend,
                     torch.zeros_like(k), attention_mode=0)  # fmt: skip
        self.refuses("attention_mode: expected 0 .* or 2 .*, got 1", attend, attention_mode=1)
        self.refuses("value: expected None or the key itself .*, got another tensor .1 x 3 x 1 x",
                     attend, torch.zeros_like(k))  # fmt: skip
        self.refuses("key_rope: expected .1 x 3 x 1 x any., got .1 x 3 x 2 x 32.", attend,
                     query_rope=q, key_rope=q)  # fmt: skip
        self.refuses("sparse_block_size: expected 1, got 2", attend, sparse_block_size=2)
        both = "query_rope and key_rope: expected both or neither, got"
        self.refuses(f"{both} query_rope alone", attend, query_rope=q)
        self.refuses(f"{both} key_rope alone", attend, key_rope=k)
        self.refuses("layouts .* expected the same, got 'BSND' and 'TND'", attend, layout_kv="TND")
        self.refuses("sparse_indices", ops.sparse_flash_attention, q, k, None, indices[0], 1.0)
        weights = torch.zeros(1, 3, 2)
        self.refuses("expected one head", ops.lightning_indexer, q, q, weights)
        self.refuses("ends of documents", ops.lightning_indexer, q[0], k[0], weights[0],
                     layout_query="TND", layout_key="TND",
                     actual_seq_lengths_query=torch.tensor([4]))  # fmt: skip
        for length in (-1, 4):
            self.refuses(rf"actual_seq_lengths\[0\] is {length}, expected 0 to 3",
                         ops.lightning_indexer, q, k, weights,
                         actual_seq_lengths_key=torch.tensor([length]))  # fmt: skip
        self.refuses(r"lengths_query and actual_seq_lengths_key: expected .*, got \[2\] and \[3\]",
                     ops.lightning_indexer, q, k, weights,
                     actual_seq_lengths_query=torch.tensor([2]),
                     actual_seq_lengths_key=torch.tensor([3]))  # fmt: skip
        self.refuses(r"actual_seq_qlen and actual_seq_klen: expected .*, got \[2\] and \[3, 3\]",
                     ops.dense_lightning_indexer_softmax_lse, q, k, weights,
                     actual_seq_qlen=[2], actual_seq_klen=[3, 3])  # fmt: skip
        many = list(range(9))
        self.refuses(r"got \[0, 1, 2, 3, 4, 5, 6, 7, ... \(9\)\] and \[3\]",
                     ops.dense_lightning_indexer_softmax_lse, q, k, weights,
                     actual_seq_qlen=many, actual_seq_klen=[3])  # fmt: skip
        statistics = torch.zeros(1, 1, 3, 2)
        for first in (-1, 2):
            self.refuses(rf"first_query: expected 0 to 1 \(2 of 3 positions\), got {first}",
                         ops.dense_attention_head_sum, q[:, :2], k, statistics[:, :, :2],
                         statistics[:, :, :2], 1.0, first_query=first)  # fmt: skip
        self.refuses("query: expected at most 2 positions, the keys, got 3",
                     ops.dense_attention_head_sum, q, k[:, :2], statistics, statistics,
                     1.0)  # fmt: skip
        self.refuses("softmax_max", ops.sparse_attention_head_sum, q, k, indices,
                     statistics[..., :1], statistics, 1.0)  # fmt: skip

    def test_a_rope_part_of_another_dtype_is_refused(self):
        """Of every operator that takes one."""
        q, k, w = torch.zeros(1, 3, 2, 32), torch.zeros(1, 3, 1, 32), torch.zeros(1, 3, 2)
        indices = torch.full((1, 3, 1, 2), -1, dtype=torch.int32)
        saved, of_index = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3)
        calls = {
            "flash_attention": (q, k, None, SCALE),
            "flash_attention_grad": (q, k, None, q, q, saved, saved, SCALE),
            "sparse_flash_attention": (q, k, None, indices, SCALE),
            "sparse_flash_attention_grad": (q, k, None, indices, q, q, saved, saved, SCALE, 1),
            "sparse_attention_head_sum": (q, k, indices, saved, saved, SCALE),
            "dense_attention_head_sum": (q, k, saved, saved, SCALE),
            "sparse_lightning_indexer_grad_kl_loss": (q, k, q, k, w, indices, saved, saved, SCALE),
            "dense_lightning_indexer_grad_kl_loss": (
                q, k, q, k, w, saved, saved, of_index, of_index, SCALE,
            ),
        }  # fmt: skip
        for name, arguments in calls.items():
            operator = getattr(ops, name)
            with self.subTest(name):
                operator(*arguments, query_rope=q, key_rope=k)
                self.refuses(f"{name}: query_rope: expected Float, the dtype of query, got Double",
                             operator, *arguments, query_rope=q.double(), key_rope=k)  # fmt: skip
                self.refuses(f"{name}: key_rope: expected Float, the dtype of key, got BFloat16",
                             operator, *arguments, query_rope=q, key_rope=k.bfloat16())  # fmt: skip

    def test_a_key_that_a_query_does_not_see_is_named(self):
        """Of every operator that takes a selection and the lengths of the documents."""
        cases = {  # layout, lengths: (query, wrong key, what is seen)
            ("BSND", None): ((0, 1, "0 to 0"), (2, -2, "0 to 2"), (1, 3, "0 to 1")),
            ("BSND", (2,)): ((2, 0, "it sees none"), (1, 2, "0 to 1")),
            ("TND", (1, 3)): ((1, 0, "1 to 1"), (2, 0, "1 to 2"), (0, 1, "0 to 0")),
        }
        for (layout, ends), wrong in cases.items():
            for query, key, seen in wrong:
                with self.subTest(layout=layout, ends=ends, query=query, key=key):
                    text = f"sparse_indices of query {query} of row 0 hold {key}, .*: {seen};"
                    for call in self.takes_a_selection(layout, ends, query, key):
                        self.refuses(text, call)
        no_lengths = self.takes_a_selection("TND", None, 0, 0)
        for call in no_lengths:
            self.refuses("actual_seq_lengths: expected the ends .* for TND, got None", call)

    def takes_a_selection(self, layout, ends, query, key):
        """Calls with one index in an otherwise empty selection."""
        indices = torch.full((1, 3, 1, 2), -1, dtype=torch.int32)
        indices[0, query, 0, 1] = key
        q, k, w = torch.zeros(1, 3, 2, 32), torch.zeros(1, 3, 1, 32), torch.zeros(1, 3, 2)
        if layout == "TND":
            indices, q, k, w = indices[0], q[0], k[0], w[0]
        saved = torch.ones((1, 3, 2) if layout == "TND" else (1, 1, 3, 2))
        lengths = None if ends is None else torch.tensor(ends)
        yield lambda: ops.sparse_flash_attention(
            q, k, None, indices, SCALE, layout_query=layout, layout_kv=layout,
            actual_seq_lengths_kv=lengths,
        )  # fmt: skip
        yield lambda: ops.sparse_flash_attention_grad(
            q, k, None, indices, q, q, saved, saved, SCALE, 1, layout=layout,
            actual_seq_qlen=lengths,
        )  # fmt: skip
        yield lambda: ops.lightning_indexer_grad(
            q, k, torch.zeros(indices.shape), indices, w, lengths, layout=layout
        )
        yield lambda: ops.sparse_lightning_indexer_grad_kl_loss(
            q, k, q, k, w, indices, saved, saved, SCALE, actual_seq_klen=ends, layout=layout
        )

    def test_what_a_gradient_gets_from_its_forward_is_checked(self):
        for index in (-1, 4):
            self.refuses(rf"experts: expected 0 to 3 \(E - 1\), got {index}", ops.moe_gating_top_k_backward, torch.ones(2, 4),
                         torch.ones(2, 1), torch.tensor([[0], [index]]))  # fmt: skip
        for dtype in (torch.float32, torch.float64):
            arguments = {
                "query": torch.zeros(1, 3, 2, 32, dtype=dtype),
                "key": torch.zeros(1, 3, 1, 32, dtype=dtype),
                "value": None,
                "sparse_indices": torch.tensor([0, -1]).expand(1, 3, 1, 2).int(),
                "d_out": torch.zeros(1, 3, 2, 32, dtype=dtype),
                "out": torch.zeros(1, 3, 2, 32, dtype=dtype),
                "softmax_max": torch.zeros(1, 1, 3, 2),
                "softmax_sum": torch.ones(1, 1, 3, 2),
                "scale_value": 1.0,
                "sparse_block_size": 1,
            }
            ops.sparse_flash_attention_grad(*arguments.values())
            for text, name, wrong in (
                ("key: expected", "query", torch.zeros(1, 3, 2, 64, dtype=dtype)),
                ("key .*: expected one head", "key", torch.zeros(1, 3, 2, 32, dtype=dtype)),
                ("indices: expected", "sparse_indices", torch.zeros(1, 2, 1, 2)),
                ("d_out: expected", "d_out", torch.zeros(1, 3, 1, 32, dtype=dtype)),
                ("out: expected", "out", torch.zeros(1, 3, 1, 32, dtype=dtype)),
                ("out: expected", "out", torch.zeros(1, 3, 2, 64, dtype=dtype)),
                ("softmax_max: expected", "softmax_max", torch.zeros(1, 1, 3, 1)),
                ("softmax_sum: expected", "softmax_sum", torch.zeros(1, 1, 2, 2)),
            ):
                with self.subTest(name, dtype=dtype):
                    self.refuses(text, ops.sparse_flash_attention_grad,
                                 *(arguments | {name: wrong}).values())  # fmt: skip

    def test_an_incoming_gradient_of_another_dtype_is_converted(self):
        x, weight = constant(6, 64), constant(64)
        _, rstd = ops.rms_norm(x, weight)
        tokens, probs = constant(6, 32), constant(6, 2)
        _, rows = ops.moe_token_permute(tokens, torch.tensor([[0, 1]] * 6))
        permuted, counts = constant(12, 32), torch.tensor([5, 7])
        query, key = constant(1, 6, 2, 32), constant(1, 6, 1, 32)
        indices = torch.tensor([0, -1], dtype=torch.int32).expand(1, 6, 1, 2)
        out, *statistics = ops.sparse_flash_attention(
            query, key, None, indices, SCALE, return_softmax_lse=True
        )
        out = out.bfloat16().float()
        gradients = (
            (lambda d: ops.swiglu_backward(d, x), constant(6, 32)),
            (lambda d: ops.rms_norm_backward(d, x, weight, rstd), constant(6, 64)),
            (lambda d: ops.add_rms_norm_backward(x, x, weight, rstd, d), constant(6, 64)),
            (
                lambda d: ops.moe_token_permute_grad(tokens, d, torch.zeros(6, 2), rows),
                constant(12, 32),
            ),
            (lambda d: ops.moe_token_unpermute_grad(permuted, d, rows, probs), tokens),
            (
                lambda d: ops.grouped_matmul_grad(
                    d, permuted, constant(2, 64, 32), counts, [True, True]
                ),
                constant(12, 64),
            ),
            (
                lambda d: ops.sparse_flash_attention_grad(
                    query, key, None, indices, constant(*out.shape), d, *statistics, SCALE, 1
                ),
                out,
            ),
        )
        for i, (gradient, d) in enumerate(gradients):
            with self.subTest(i):
                d = d.bfloat16()
                found, expected = gradient(d), gradient(d.float())
                torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Fallbacks(TestCase):
    def warnings_of(self, call):
        """What the library writes to the process's streams while it computes."""
        with tempfile.TemporaryFile() as written:
            kept = [(fd, os.dup(fd)) for fd in (1, 2)]
            for fd, _ in kept:
                os.dup2(written.fileno(), fd)
            try:
                call()
            finally:
                for fd, copy in kept:
                    os.dup2(copy, fd)
                    os.close(copy)
            written.seek(0)
            return written.read().decode()

    def test_fp16_says_that_the_definition_computes(self):
        """Of the operators that are called below autograd, gradients among them; once each."""

        def half(*shape):
            return constant(*shape).half()

        x, weight, tokens, permuted = half(6, 64), half(64), half(6, 32), half(12, 32)
        rstd = torch.ones(6, 1)
        chosen = torch.tensor([[0, 1]] * 6)
        _, rows = ops.moe_token_permute(tokens.float(), chosen)
        q, k, saved = half(1, 6, 2, 32), half(1, 6, 1, 32), torch.ones(1, 1, 6, 2)
        indices = torch.tensor([0, -1], dtype=torch.int32).expand(1, 6, 1, 2)
        d = half(12, 64), permuted, half(2, 64, 32), torch.tensor([5, 7])
        for name, call in (
            ("swiglu", lambda: ops.swiglu(x)),
            ("swiglu_backward", lambda: ops.swiglu_backward(tokens, x)),
            ("rms_norm", lambda: ops.rms_norm(x, weight)),
            ("rms_norm_add", lambda: ops.add_rms_norm(x, x, weight)),
            ("rms_norm_grad", lambda: ops.rms_norm_backward(x, x, weight, rstd)),
            ("moe_gating_top_k_backward",
             lambda: ops.moe_gating_top_k_backward(x, half(6, 2), chosen)),
            ("moe_token_permute_grad",
             lambda: ops.moe_token_permute_grad(tokens, permuted, chosen, rows)),
            ("moe_token_unpermute_grad",
             lambda: ops.moe_token_unpermute_grad(permuted, tokens, rows, half(6, 2))),
            ("grouped_matmul_grad", lambda: ops.grouped_matmul_grad(*d, [True, True])),
            ("linear_cross_entropy", lambda: ops.linear_cross_entropy_and_grad(
                tokens, half(5, 32), torch.zeros(6, dtype=torch.long), [True, True])),
            ("flash_attention_grad",
             lambda: ops.flash_attention_grad(q, k, None, q, q, saved, saved, SCALE)),
            ("sparse_flash_attention_grad", lambda: ops.sparse_flash_attention_grad(
                q, k, None, indices, q, q, saved, saved, SCALE, 1)),
            ("dense_attention_head_sum",
             lambda: ops.dense_attention_head_sum(q, k, saved, saved, SCALE)),
        ):  # fmt: skip
            with self.subTest(name):
                said = f"{name}: the fused kernel is not used: it computes in Float and BFloat16"
                self.assertIn(f"{said}, not in Half", self.warnings_of(call))
                self.assertEqual(self.warnings_of(call), "")


class Others(TestCase):
    def test_the_example_of_the_documentation(self):
        page = (Path(__file__).parents[3] / "docs/operators.md").read_text()
        example = page.split("```python\n")[1].split("```")[0]
        names = {}
        exec(example.replace("build/release/longhaul/ops/liblonghaul_ops.so", support.LIBRARY), names)
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
