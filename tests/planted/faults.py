"""Forty faults of the kind that a change brings in and a quick look misses: what shows that a suite sees less than it
did.

Each is a line or two of the package, and what they become. Whether tests see it is found out beside this file, in a
copy of the repository.
"""

from __future__ import annotations

import dataclasses

# Kind -> how many there are.
KINDS = {"matcher": 20, "lowering": 10, "remat": 5, "config": 5}


@dataclasses.dataclass(frozen=True)
class Fault:
    """`old`, which is once in `file`, becomes `new`. why: what a user would see of it. tests: the files and folders most
    likely to notice. interpreter: whether it is in a kernel, which a machine without a GPU runs in Triton's interpreter
    alone."""

    name: str
    kind: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]
    interpreter: bool = False


FAULTS = (
    # --- matchers, passes, and what they stand on
    Fault(
        "rope-keys-turned-back", "matcher", "megacpp_compile/passes/rope_qk.py",
        "return cos if math.isclose(cos, sin, rel_tol=1e-12) else None",
        "return cos",
        "Keys that a model turns the other way than its queries are turned as its queries are.",
        ("tests/passes/test_rope_qk.py",),
    ),
    Fault(
        "absorbed-queries-taken", "matcher", "megacpp_compile/passes/mla_rope_q.py",
        'head.kind == "separate" and not all(p and from_projection(p) for p in (rotation.nope, rotation.rope)),',
        'head.kind == "separate" and not any(p and from_projection(p) for p in (rotation.nope, rotation.rope)),',
        "Absorbed queries, which are no projection's, are copied into one tensor to be turned, and nothing says so.",
        ("tests/passes/test_mla_rope_q.py",),
    ),
    Fault(
        "tables-under-another-tag", "matcher", "megacpp_compile/passes/mla_rope_kv.py",
        '_rotated_apart(head), head.root, "table-rows",',
        '_rotated_apart(head), head.root, "tables",',
        "Who looks a near miss up by its tag reads of queries and keys with different tables.",
        ("tests/passes/test_mla_rope_kv.py",),
    ),
    Fault(
        "latent-not-kept", "matcher", "megacpp_compile/passes/down_norm_up.py",
        "keep = bool(more.raw) or any(keeps(view, user, read) for user, read in others)",
        "keep = bool(more.raw)",
        "Beside an op that keeps the normed latent for backward, the down-projection is run a second time all the same.",
        ("tests/passes/test_latents.py",),
    ),
    Fault(
        "divided-norm-multiplied", "matcher", "megacpp_compile/matchers/gated_rms_norm.py",
        "self.scale = self.scale / other if divides else self.scale * other",
        "self.scale = self.scale * other",
        "A gated norm that is divided by a number is multiplied by it.",
        ("tests/passes/test_gated_rms_norm.py",),
    ),
    Fault(
        "mean-of-one-channel-less", "matcher", "megacpp_compile/matchers/rms_norm.py",
        "if divisor is not None and abs(divisor / fake.shape[-1] - 1) > 1e-6:",
        "if divisor is not None and abs(divisor - fake.shape[-1]) > 1:",
        "A norm by a sum of squares over n - 1 is computed as if it were over n.",
        ("tests/matchers/test_rms_norm.py",),
    ),
    Fault(
        "rows-specialised-by-float8", "matcher", "megacpp_compile/passes/linear.py",
        "if not statically_known_true(size % MULTIPLES[recipe] == 0):  # type: ignore[operator]",
        "if size % MULTIPLES[recipe] != 0:  # type: ignore[operator]",
        "A dynamic batch in float8 is guarded to be a multiple of 16: other sizes compile anew, without float8.",
        ("tests/passes/test_linear.py",),
    ),
    Fault(
        "linears-before-experts", "matcher", "megacpp_compile/passes/linear.py",
        'after = ("moe",)',
        "after: tuple[str, ...] = ()",
        "Under a precision plan the GEMMs of routed experts become single linears in float8, and the layer is lost.",
        ("tests/passes/test_precision_rows.py",),
    ),
    Fault(
        "last-identity-expert-lost", "matcher", "megacpp_compile/passes/_rewrites/experts.py",
        "build(aten.gt.Scalar, indices, last))",
        "build(aten.ge.Scalar, indices, last))",
        "The last of the experts that return what they read adds nothing.",
        ("tests/passes/test_moe.py",),
    ),
    Fault(
        "read-through-another-view", "matcher", "megacpp_compile/fx/aliasing.py",
        "    base = memory_of(tensor)\n",
        "    base = tensor\n",
        "A kernel overwrites memory that another view of the same tensor is still to be read through.",
        ("tests/backends/test_in_place.py",),
    ),
    Fault(
        "state-cleared-by-the-last-token", "matcher", "megacpp_compile/passes/ssd_scan.py",
        "build(aten.select.int, documents, 1, 0), [-1, 1, 1, 1])",
        "build(aten.select.int, documents, 1, -1), [-1, 1, 1, 1])",
        "An initial state goes on into a document that begins with the first token of a packed scan.",
        ("tests/passes/test_packed_scan.py",),
    ),
    Fault(
        "gradient-through-no-grad", "matcher", "megacpp_compile/passes/gated_delta_rule.py",
        "recurrence(view, rule.operands.values(), rule.inside, rule.o, rule.final_states, emit)",
        "recurrence(view, rule.operands.values(), {leaf.node for leaf in (rule.o, *rule.final_states)}, rule.o, "
        "rule.final_states, emit)",
        "A delta rule of which a model makes a part under `no_grad` is differentiated as a whole.",
        ("tests/passes/test_gated_delta_rule.py",),
    ),
    Fault(
        "states-read-elsewhere", "matcher", "megacpp_compile/matchers/token_loops/steps.py",
        "for n in sorted(depends - {states[-1]}):",
        "for n in sorted(depends - set(states)):",
        "A loop over tokens whose states the model returns is run beside the op that was to replace it.",
        ("tests/passes/test_token_loop.py",),
    ),
    Fault(
        "convolution-of-the-next-step", "matcher", "megacpp_compile/matchers/causal_conv.py",
        "return self.left - first == self.taps - 1 and same_size",
        "return self.left - first <= self.taps - 1 and same_size",
        "A convolution that sees later steps is computed as one that sees none.",
        ("tests/matchers/test_causal_conv.py",),
    ),
    Fault(
        "softmax-over-tokens", "matcher", "megacpp_compile/matchers/linear_cross_entropy/reads.py",
        "NoMatch.when(found.of is not logits.node or found.dim != logits.dim)",
        "NoMatch.when(found.of is not logits.node)",
        "What a model subtracts as the log-sum-exp over tokens is computed over words.",
        ("tests/passes/test_heads_left_alone.py",),
    ),
    Fault(
        "a-row-too-many-seen", "matcher", "megacpp_compile/matchers/latent_attention/masks.py",
        "aten.lt.Tensor: (1, 1), aten.lt.Scalar: (1, 1),",
        "aten.lt.Tensor: (1, 0), aten.lt.Scalar: (1, 0),",
        "A decoding step whose mask says `rows < length` attends to one row behind the last.",
        ("tests/matchers/test_latent_attention.py",),
    ),
    Fault(
        "rows-listed-twice", "matcher", "megacpp_compile/matchers/latent_attention/lists.py",
        "return Named(*whole, named, other, repeats=True)",
        "return Named(*whole, named, other)",
        "A row that a list of the caller's names twice has twice its weight in sparse attention.",
        ("tests/matchers/test_selections.py",),
    ),
    Fault(
        "compressed-all-the-same", "matcher", "megacpp_compile/passes/_rewrites/activation_lifetime.py",
        "return linear is not None and not view.has_backward(linear.w) and storage_owner(linear.w) is not base",
        "return linear is not None and storage_owner(linear.w) is not base",
        "Gradients are made approximate for an input that another trained linear keeps anyway: nothing is saved.",
        ("tests/passes/test_compressed_linear.py",),
    ),
    Fault(
        "taps-of-other-documents", "matcher", "megacpp_compile/matchers/masked_taps.py",
        "same.lag == lag and same.differs == (mask in cleared) and _one_wide(mask, 3 - time)",
        "same.lag == lag and _one_wide(mask, 3 - time)",
        "A convolution that a mask keeps to other documents' steps is computed as one within documents.",
        ("tests/passes/test_packed_conv.py",),
    ),
    Fault(
        "early-write-to-shared-memory", "matcher", "megacpp_compile/frontend/hoisted_input_writes.py",
        "written = {storage_id(args[i]) for i in places}",
        "written = {id(args[i]) for i in places}",
        "A frame whose arguments share the memory that it writes to ahead of its reads runs as if they did not.",
        ("tests/frontend/test_hidden_writes.py",),
    ),
    # --- lowerings
    Fault(
        "values-with-strides-of-their-own", "lowering", "megacpp_compile/lowerings/mla_rope_kv/__init__.py",
        "return k, torch.empty_like(kv)[..., nope_dim:]",
        "return k, kv.new_empty((*kv.shape[:-1], kv.shape[-1] - nope_dim))",
        "Compiled code reads values by strides that they do not have.",
        ("tests/lowerings/test_mla_rope_kv.py",),
    ),
    Fault(
        "projections-saved-too", "lowering", "megacpp_compile/lowerings/down_norm_up/__init__.py",
        "ctx.save_for_backward(x, w_down, b_down, w_norm, rrms, kept, x_side, w_side, *w_up)",
        "ctx.save_for_backward(x, w_down, b_down, w_norm, rrms, kept, x_side, w_side, *w_up, *output[0])",
        "A low-rank pair keeps its results for a backward that does not read them.",
        ("tests/lowerings/test_down_norm_up.py",),
    ),
    Fault(
        "state-of-an-empty-document", "lowering", "megacpp_compile/lowerings/_kernels/chunk_grid.py",
        "return torch.where(self.some, states[0, chunk], outside)",
        "return states[0, chunk]",
        "The state behind a document without tokens is that of a neighbour.",
        ("tests/lowerings/test_gated_delta_rule.py",),
    ),
    Fault(
        "garbage-behind-the-cache", "lowering", "megacpp_compile/lowerings/mla_decode/reference.py",
        "there = (place < lengths[:, None]).unsqueeze(-1)",
        "there = (place <= lengths[:, None]).unsqueeze(-1)",
        "A step is NaN where the cache holds no number right behind its last row.",
        ("tests/lowerings/test_mla_decode.py",),
    ),
    Fault(
        "gradient-through-the-sum-of-exponentials", "lowering", "megacpp_compile/lowerings/sparse_mla/reference.py",
        "return delta if grad_lse is None else delta - grad_lse",
        "return delta if grad_lse is None else delta + grad_lse",
        "A loss of the log-sum-exps, as of parts of attention that are put together, has gradients of the wrong sign.",
        ("tests/lowerings/test_sparse_mla.py",),
    ),
    Fault(
        "no-expert-of-256", "lowering", "megacpp_compile/lowerings/moe/reference.py",
        "torch.uint8 if experts < 256 else",
        "torch.uint8 if experts <= 256 else",
        "Of 256 experts the first also gets the rows that chose none.",
        ("tests/lowerings/test_moe.py",),
    ),
    Fault(
        "row-scales-in-float32", "lowering", "megacpp_compile/lowerings/linear_fp8_weight/cuda_triton.py",
        "and scale.numel() > 1 and out_dtype != torch.bfloat16:",
        "and scale.numel() > 1 and out_dtype == torch.float16:",
        "On a GPU a weight in float8 with a scale for every row fails where results are in float32.",
        ("tests/lowerings/test_linear_fp8_weight.py",),
    ),
    Fault(
        "newest-maxima-forgotten", "lowering", "megacpp_compile/lowerings/fp8_linear/reference.py",
        "pushed = torch.cat([newest.nan_to_num(0, 0, 0)[None], history[:-1]])",
        "pushed = torch.cat([newest.nan_to_num(0, 0, 0)[None], history[1:]])",
        "Delayed scaling forgets the last step's maxima and keeps those of the first.",
        ("tests/backends/test_delayed_scaling.py",),
    ),
    Fault(
        "gradient-of-words-in-16-bits", "lowering", "megacpp_compile/lowerings/linear_cross_entropy/reference.py",
        "of_rows = d.t(), self.x[rows].to(d.dtype)",
        "of_rows = d.t().to(self.x.dtype), self.x[rows]",
        "The gradient of a head in bfloat16 is rounded, and added up rounded, chunk by chunk of tokens.",
        ("tests/lowerings/test_linear_cross_entropy.py",),
    ),
    Fault(
        "words-that-are-none", "lowering", "megacpp_compile/lowerings/linear_cross_entropy/_triton_rows.py",
        'return tl.where(first + words < WORDS, z, float("-inf"))',
        'return tl.where(first + words < ROOM, z, float("-inf"))',
        "On a GPU what pads a row of logits counts as words, where their number is no multiple of 8.",
        ("tests/lowerings/test_linear_cross_entropy_kernels.py",),
        interpreter=True,
    ),
    # --- what backward keeps
    Fault(
        "overwritten-input-read-anew", "remat", "megacpp_compile/remat/tagging.py",
        "        if kept := overwritten.keep(graph):\n            forward, needed = joint(graph)\n",
        "        kept = list[Node]()\n",
        "Backward reads the new value of a buffer that the forward has overwritten.",
        ("tests/remat/test_conflicts.py",),
    ),
    Fault(
        "groups-a-layer-early", "remat", "megacpp_compile/remat/decisions.py",
        "return size < 0 or (self.layers.index(layer) + 1) % size == 0",
        "return size < 0 or self.layers.index(layer) % size == 0",
        "Streams are saved in front of groups of layers, once more than `stream_group` says.",
        ("tests/remat/test_streams.py",),
    ),
    Fault(
        "reserve-not-kept-free", "remat", "megacpp_compile/remat/planner.py",
        "limit = int((policy.peak_gib - policy.reserve_gib) * 2**30)",
        "limit = int(policy.peak_gib * 2**30)",
        "What `reserve_gib` is to keep free for an optimizer's state is planned with.",
        ("tests/remat/test_peak.py",),
    ),
    Fault(
        "plan-of-other-block-kinds", "remat", "megacpp_compile/remat/tagging.py",
        "return repr(self.policy), tuple(sorted(self.block_kinds.items())), around",
        "return repr(self.policy), around",
        "After a change of `block_kinds` code comes from the cache with the plan of before.",
        ("tests/remat/test_policy.py",),
    ),
    Fault(
        "columns-at-odd-addresses", "remat", "megacpp_compile/backends/joined_results.py",
        " and first * whole.itemsize % ALIGNED == 0:",
        ":",
        "On a GPU kernels write to columns whose rows begin at addresses that vectors are not written to.",
        ("tests/backends/test_joined_results.py",),
    ),
    # --- config and report
    Fault(
        "latents-from-the-cache", "config", "megacpp_compile/config/options.py",
        '_PRINTS = ("explain", "summary")',
        '_PRINTS = ("explain", "summary", "keep_latents")',
        "Changing `keep_latents` has no effect on code that is cached.",
        ("tests/config/test_options.py",),
    ),
    Fault(
        "star-for-no-segment", "config", "megacpp_compile/config/globs.py",
        "return any(_match(parts[1:], segments[i:]) for i in range(1, len(segments) + 1))",
        "return any(_match(parts[1:], segments[i:]) for i in range(len(segments) + 1))",
        "A rule for what is inside of a module, as `layers.*`, is also one for the module itself.",
        ("tests/config/test_globs.py",),
    ),
    Fault(
        "last-layer-recomputed", "config", "megacpp_compile/config/checkpointing.py",
        'return operation in self.recompute and not (last and self.last_layer == "never")',
        "return operation in self.recompute",
        "Named operations are recomputed in the last layer, too, whose backward comes at once.",
        ("tests/remat/test_operations.py",),
    ),
    Fault(
        "storage-counted-twice", "config", "megacpp_compile/report/saved_bytes.py",
        "self.kept[key] = max(self.kept.get(key, 0), size)",
        "self.kept[key] = self.kept.get(key, 0) + size",
        "The report counts a tensor once for each time that autograd saves it.",
        ("tests/report/test_saved_bytes.py", "tests/report/test_report.py"),
    ),
    Fault(
        "unknown-bytes-without-a-reason", "config", "megacpp_compile/report/records.py",
        "site.saved_before, site.saved_after, site.saved_reason = before, after, reason",
        "site.saved_before, site.saved_after, site.saved_reason = before, after, self.saved_reason",
        "A site whose saved bytes are unknown does not say why.",
        ("tests/passes/test_driver.py",),
    ),
)  # fmt: skip
