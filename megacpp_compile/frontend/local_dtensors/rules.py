"""Which calls on DTensors every rank can compute on its own part: what is known of calls by name, and what their
placements say."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from megacpp_compile.errors._attempts import GivenUp
from megacpp_compile.frontend.dtensors import leaves, writes
from megacpp_compile.fx.edit import called, dynamo_value, same_size, same_sizes

SIZED = frozenset(("view", "reshape", "expand", "unflatten"))  # told the sizes of their result
VIEWS = frozenset(
    "view reshape expand unflatten transpose permute movedim swapaxes t flatten squeeze unsqueeze getitem chunk split "
    "tensor_split unbind narrow select contiguous clone alias".split()
)
CASTS = frozenset("to float bfloat16 half double type type_as".split())
_ELEMENTWISE = frozenset(
    "add sub mul div truediv neg pow square sqrt rsqrt reciprocal exp log sigmoid tanh silu gelu relu softplus "
    "logsigmoid clamp clamp_min clamp_max minimum maximum abs sin cos where lerp addcmul radd rsub rmul "
    "masked_fill".split()
)  # fmt: skip
_ROWS = frozenset(
    "rms_norm layer_norm softmax log_softmax logsumexp cat stack mean view_as_complex view_as_real".split()
)
_SLICES = frozenset("getitem narrow select chunk split tensor_split unbind".split())
BROADCAST = _ELEMENTWISE | {"cat", "stack"}
_PRODUCTS = frozenset("linear matmul mm bmm einsum".split())
_LOOKUPS = frozenset("gather index_select take_along_dim".split())  # where each rank has all of both
KNOWN = VIEWS | CASTS | {"detach"} | _ELEMENTWISE | _ROWS | _PRODUCTS | _LOOKUPS | {"sum"}

_LINEAR = VIEWS | CASTS | {"neg", "add", "sub", "cat", "stack", "view_as_complex", "view_as_real"}


class NeedsCommunication(GivenUp):
    """A call is more than what each rank computes of its own part."""


def gradients_to_sum(name: str, given: dict[Node, list[Any]], results: list[Any]) -> dict[Node, tuple[int, ...]]:
    """Operand -> the dimensions of the mesh over which its gradient is a partial sum. Raises NeedsCommunication
    for a call whose placements say that it is not computed on each rank's part alone."""
    every = [v for values in given.values() for v in values] + results
    mesh = every[0].device_mesh
    NeedsCommunication.when(any(v.device_mesh != mesh for v in every) or not all(map(is_plain, every)))
    summed: dict[Node, list[int]] = {a: [] for a in given}
    for dim in range(mesh.ndim):
        differs = [not v.placements[dim].is_replicate() for v in results]
        partial = [v.placements[dim].is_partial() for v in results]
        ins = [v.placements[dim] for values in given.values() for v in values]
        NeedsCommunication.when(any(differs) != all(differs) or any(differs) == all(p.is_replicate() for p in ins))
        NeedsCommunication.when(name in _LOOKUPS and any(differs))
        if any(p.is_partial() for p in ins):  # a view of a sum is the sum of views; little else is
            NeedsCommunication.when(name not in VIEWS or not all(p.is_partial() for p in ins) or not all(partial))
        elif any(partial) and (name not in _PRODUCTS | {"sum"} or len(given) > 2):  # a bias is added once only
            raise NeedsCommunication
        for a, values in given.items():
            if any(differs) and all(v.placements[dim].is_replicate() for v in values):
                if any(v.requires_grad for v in values):
                    summed[a].append(dim)
    return {a: tuple(dims) for a, dims in summed.items()}


def along_shards(name: str, node: Node, given: dict[Node, list[Any]], results: list[Any]) -> bool:
    """Whether a call mixes or takes apart what lies along a sharded dimension, which DTensor may still return sharded:
    under `loss_parallel` a softmax is."""
    x = next(iter(given.values()))[0]
    sharded = {p.dim for p in x.placements if p.is_shard()}
    if name in ("softmax", "log_softmax"):
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return not isinstance(dim, int) or dim % x.dim() in sharded
    if name in ("rms_norm", "layer_norm"):
        shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
        normed = len(shape) if isinstance(shape, (list, tuple)) else 1
        return any(dim >= x.dim() - normed for dim in sharded)
    if name in _SLICES:
        kept = [(p, q, v) for v in results for p, q in zip(x.placements, v.placements, strict=True) if p.is_shard()]
        return not all(q.is_shard() and same_size(x.shape[p.dim], v.shape[q.dim]) for p, q, v in kept)
    return False


@dataclasses.dataclass(frozen=True)
class VocabParallelCall:
    """What a call reads of logits whose words are sharded. operands: the logits, and of a cross entropy the targets,
    the same on all ranks. settings: of `sharded_cross_entropy` or `sharded_logsumexp`, behind these."""

    operands: tuple[Node, ...]
    settings: tuple[Any, ...]


def words_of_ranks(node: Node) -> VocabParallelCall | None:
    """The loss that a call of `F.cross_entropy` is, where its logits are sharded by words over one dimension of the
    mesh, in equal parts, and everything else about it is the same on all ranks."""
    given = _CROSS_ENTROPY.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    logits, target, settings = given.arguments["input"], given.arguments["target"], given.arguments
    if not isinstance(logits, Node) or not isinstance(target, Node):
        return None
    x, labels, result = dynamo_value(logits), dynamo_value(target), dynamo_value(node)
    if getattr(x, "device_mesh", None) is None or getattr(result, "device_mesh", None) != x.device_mesh:
        return None
    if any(settings[name] is not None for name in ("weight", "size_average", "reduce")) or labels.is_floating_point():
        return None
    part = _part_of_words(x, min(1, x.dim() - 1), [*result.placements, *getattr(labels, "placements", ())])
    if part is None:
        return None
    more = settings["ignore_index"], float(settings["label_smoothing"]), settings["reduction"], *part
    return VocabParallelCall((logits, target), more)


def logsumexp_of_ranks(node: Node) -> VocabParallelCall | None:
    """The log-sum-exp that a call of `torch.logsumexp` is, under the conditions of `words_of_ranks`."""
    (logits, *more), kwargs = spelled_out(node)
    given = {**dict(zip(("dim", "keepdim"), more, strict=False)), **kwargs}
    dim, keepdim = given.get("dim"), given.get("keepdim", False)
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if not isinstance(logits, Node) or not isinstance(dim, int) or set(given) - {"dim", "keepdim"}:
        return None
    x, result = dynamo_value(logits), dynamo_value(node)
    if getattr(x, "device_mesh", None) is None or getattr(result, "device_mesh", None) != x.device_mesh:
        return None
    part = _part_of_words(x, dim % x.dim(), result.placements)
    return None if part is None else VocabParallelCall((logits,), (dim % x.dim(), bool(keepdim), *part))


def _part_of_words(x: Any, words: int, same: Sequence[Any]) -> tuple[int, Any, str] | None:
    """(the first of a rank's words, how many there are in all, the group whose ranks have them) of logits x that are
    sharded by words, the dimension of that number, over one dimension of the mesh in equal parts; None where they are
    not, or where not all the placements `same` are replicated."""
    parts = [i for i, p in enumerate(x.placements) if p.is_shard(words)]
    others = [p for i, p in enumerate(x.placements) if i not in parts]
    if len(parts) != 1 or not all(p.is_replicate() for p in (*others, *same)) or not is_plain(x):
        return None
    own = part_of(x).shape[words]
    if not isinstance(own, int):
        return None
    first = x.device_mesh.get_local_rank(parts[0]) * own
    return first, x.shape[words], x.device_mesh.get_group(parts[0]).group_name


_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


def promised(placements: Sequence[Any], summed: Sequence[int] = ()) -> tuple[Any, ...]:
    """How the gradient of a tensor with these placements is placed: a partial sum over the mesh's dimensions `summed`,
    and whole for a tensor that is one."""
    from torch.distributed.tensor import Partial, Replicate

    whole = (Replicate() if p.is_partial() else p for p in placements)
    return tuple(Partial() if i in summed else p for i, p in enumerate(whole))


def cut(node: Node, result: Any) -> list[int] | None:
    """Sizes to expand to what `node` expands, where DTensor would cut a rank's run out of the expanded."""
    whole, part = result.shape, part_of(result).shape
    shape = dynamo_value(node).shape
    before = len(whole) - len(shape)
    sharded = [i for i in range(max(before, 0), len(whole)) if not same_size(whole[i], part[i])]
    sharded = [i for i in sharded if same_size(shape[i - before], whole[i])]
    if not sharded or any(not p.is_replicate() for p in dynamo_value(node).placements):
        return None
    NeedsCommunication.when(
        name_of(node) not in ("expand", "expand_as") or before or not isinstance(node.args[0], Node)
    )
    base = dynamo_value(node.args[0]).shape
    NeedsCommunication.when(len(base) != len(shape) or any(base[i] != 1 for i in sharded))
    local = [part[i] if i in sharded else s for i, s in enumerate(shape)]
    sizes = [-1 if same_size(b, s) else s for b, s in zip(base, local, strict=True)]
    NeedsCommunication.when(not all(isinstance(s, int) for s in sizes))
    return sizes


def is_plain(value: Any) -> bool:
    """Whether each rank has an equal run of each sharded dimension, and partial sums are sums."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    even = list(part_of(value).shape)
    for dim, placement in enumerate(value.placements):
        if type(placement) is Shard:
            even[placement.dim] = even[placement.dim] * value.device_mesh.size(dim)
        elif type(placement) is Partial:
            if placement.reduce_op != "sum":
                return False
        elif type(placement) is not Replicate:
            return False
    return same_sizes(even, value.shape)


def local_sizes(name: str, node: Node, results: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, sizes of its result being those of the local one."""
    args, kwargs = node.args, dict(node.kwargs)
    if name not in SIZED or same_sizes(results[0].shape, part_of(results[0]).shape):
        return args, kwargs
    NeedsCommunication.when(kwargs)
    first = 0
    x, *sizes = args
    if name == "unflatten":
        first, sizes = sizes[0], sizes[1:]
        first = first + node.args[0].meta["example_value"].dim() if first < 0 else first  # type: ignore[union-attr]
    listed = len(sizes) == 1 and isinstance(sizes[0], (list, tuple))
    sizes = list(sizes[0]) if listed else sizes
    whole, part = results[0].shape, part_of(results[0]).shape
    for i, size in enumerate(sizes):
        if not same_size(whole[first + i], part[first + i]) and size != -1:
            NeedsCommunication.when(not isinstance(size, int) or not isinstance(part[first + i], int))
            sizes[i] = part[first + i]
    new = [sizes] if listed else sizes
    return (x, *([node.args[1]] if name == "unflatten" else []), *new), kwargs


def part_of(value: Any) -> Tensor:
    with torch.no_grad():  # else a view of it
        local: Tensor = value.to_local()
    return local


def name_of(node: Node) -> str:
    return called(node).removeprefix("prim").strip("_ ")


def spelled_out(node: Node) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a call of `from_local`, `to_local` or `redistribute`: torch 2.9's Dynamo keeps those that are no
    tensors in the closure of a function that it makes. Raises NeedsCommunication where they are not to be seen."""
    closure = inspect.getclosurevars(node.target).nonlocals if isinstance(node.target, FunctionType) else {}
    if not called(node).startswith("prim"):
        return node.args, dict(node.kwargs)
    NeedsCommunication.when(not {"args_as_value", "kwargs_as_value"} <= closure.keys())
    return (*node.args, *closure["args_as_value"]), {**closure["kwargs_as_value"], **node.kwargs}


def is_linear(node: Node) -> bool:
    """Whether a call is linear in all its operands that have a gradient."""
    if node.op not in ("call_function", "call_method") or writes(node):
        return False
    name = name_of(node)
    if name in ("mul", "div", "truediv"):
        return len(found := differentiable(node)) == 1 and (name == "mul" or node.args[0] is found[0])
    return name in _LINEAR


def differentiable(node: Node) -> list[Node]:
    return [a for a in node.all_input_nodes if any(getattr(v, "requires_grad", False) for v in leaves(dynamo_value(a)))]
