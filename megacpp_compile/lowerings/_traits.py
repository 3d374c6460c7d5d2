"""What rematerialisation and reports need to know of an op without running it.

The traits of a `megacpp::` op stand beside its definition, in a call of `declare`; those of torch's ops stand here.
`traits_of` finds either.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch.fx import Node

Kernel = Literal["kernel", "in place", "pointwise", "reduction"]
FUSIBLE: tuple[Kernel, ...] = ("pointwise", "reduction")


@dataclasses.dataclass(frozen=True)
class OptionalSavedOutput:
    """An intermediate that an op returns on request, and that its backward then takes instead of recomputing it.

    All fields but `backward` count positions from 0: `flag`, the first of the op's arguments with a default, requests
    the intermediate (True); `result` is its place among the op's results; `operand` is its place among the arguments of
    the op `backward`, the first with a default. `witness` is a (result, operand) pair of the two ops that shows which
    backward belongs to which call.
    """

    backward: str
    flag: int
    result: int
    operand: int
    witness: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class OpTraits:
    """The facts of one op.

    Attributes:
        gemm: it is a GEMM, or consists of GEMMs.
        core: it is an attention core or a scan, which backward recomputes only together with its whole block.
        selection: it chooses by size, as a router's top-k does. Recomputed from values a rounding apart it could choose
            differently, so it never is.
        recomputable: running it twice is known to give the same result and to have no effects, as far as its schema
            does not already say otherwise.
        kernel: how Inductor runs it: those of `FUSIBLE` may be fused; "in place" writes over an operand that
            nobody reads later; "kernel" is a launch of its own.
        block_kind: the kind of block that has such an op, of `config.checkpointing.KINDS`; "" where many have it.
        up_projection: "kv" or "q" where the GEMMs that make its first argument are that up-projection of latent
            attention, which `CheckpointingPolicy.recompute_kv_upproj` and `recompute_q_upproj` speak of.
        flops: called with the op's arguments (fake tensors), returns the FLOPs of a 16-bit GEMM that takes as long; an
            op in fp8 therefore counts less than it multiplies. None: torch's own formula if it has one, else the time
            is that of moving its bytes.
        workspace: called like `flops`, returns the bytes that the op holds while it runs, beside operands and results;
            None for few.
        handed_over: the intermediate its backward can be given.
        routed: which of its arguments has an element for every row that values send to one of the op's experts; None
            where values route nothing.
        kept_instead: which of its arguments it keeps a smaller result of for backward, in place of the argument; None
            where it does not.
        tokens: which dimension of its first argument is the tokens of a sequence, where a token's result depends on
            other tokens, as that of a scan, a causal convolution or an attention does: of a part of the sequence it is
            another result. None where it depends on none, or on what a cache has of them.
        uncapturable: why no CUDA graph can hold it, such as a read on the host or an allocation by data; "" where one
            can. Its registration has torch's tag `cudagraph_unsafe` then.
    """

    gemm: bool = False
    core: bool = False
    selection: bool = False
    recomputable: bool = True
    kernel: Kernel = "kernel"
    block_kind: str = ""
    up_projection: Literal["", "kv", "q"] = ""
    flops: Callable[..., float] | None = None
    workspace: Callable[..., int] | None = None
    handed_over: OptionalSavedOutput | None = None
    routed: int | None = None
    kept_instead: int | None = None
    tokens: int | None = None
    uncapturable: str = ""


_DECLARED: dict[str, OpTraits] = {}

_GEMM, _OPAQUE, _REDUCTION = OpTraits(gemm=True), OpTraits(), OpTraits(kernel="reduction")
_POINTWISE, _UNKNOWN = OpTraits(kernel="pointwise"), OpTraits(recomputable=False)
_ATTENTION = OpTraits(core=True, block_kind="ablock")
_ATEN: dict[str, OpTraits] = {
    **dict.fromkeys(
        ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm", "addmv", "mv", "dot"), _GEMM
    ),
    **dict.fromkeys(("topk", "sort", "argsort", "multinomial", "nonzero"), OpTraits(selection=True)),
    **dict.fromkeys(("argmax", "argmin"), OpTraits(selection=True, kernel="reduction")),
    **dict.fromkeys(
        ("embedding_dense_backward", "index_put", "scatter", "scatter_add", "scatter_reduce", "convolution_backward"),
        _OPAQUE,
    ),
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "var_mean", "prod", "any", "all", "cumsum", "_softmax", "_log_softmax",
         "logsumexp"), _REDUCTION
    ),
}  # fmt: skip
# torch has a name for every kernel of attention and changes them between versions.
_ATTENTION_NAMES = ("scaled_dot_product", "flex_attention")
# What is not listed, by namespace; an op of any other namespace is unknown.
_BY_NAMESPACE = {
    **dict.fromkeys(("aten", "prims"), _POINTWISE),
    **dict.fromkeys(("megacpp", "inductor_prims", "prim"), _OPAQUE),
}


def declare(traits: Mapping[str, OpTraits]) -> None:
    """Make the traits of ops known, by qualified name ("megacpp::moe"). Called where the ops are registered."""
    _DECLARED.update(traits)


def declared() -> frozenset[str]:
    """The names of all ops declared by the modules imported so far."""
    return frozenset(_DECLARED)


def name_of(of: Any) -> str:
    """The qualified name of an op, or of a node's op: "aten::mm". Callables without a schema: `str` of them."""
    target = of.target if isinstance(of, Node) else of
    schema = getattr(target, "_schema", None)
    return schema.name if schema is not None else str(target)


def traits_of(of: Any) -> OpTraits:
    """The traits of an op or of a node's op; for a callable that is no op, those of an unknown one."""
    name = name_of(of)
    return _DECLARED.get(name) or _of_torch(name)


@functools.lru_cache(maxsize=1 << 12)
def _of_torch(name: str) -> OpTraits:
    if any(part in name for part in _ATTENTION_NAMES):
        return _ATTENTION
    namespace, _, op = name.partition("::")
    return (_ATEN.get(op) if namespace == "aten" else None) or _BY_NAMESPACE.get(namespace, _UNKNOWN)
