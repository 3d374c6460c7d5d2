"""Loops over tokens whose steps are one step at consecutive positions, and loops that only look so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOKENS = 16
SAME: dict[str, Callable[..., Any]] = {}  # loops that become an op
DIFFERENT: dict[str, Callable[..., Any]] = {}  # loops that stay as they are written
Q = dict[str, Any]


def same(f: Callable[..., Any]) -> Callable[..., Any]:
    SAME[f.__name__] = f
    return f


def different(f: Callable[..., Any]) -> Callable[..., Any]:
    DIFFERENT[f.__name__] = f
    return f


def new_state(q: Tensor, v: Tensor) -> Tensor:
    return q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]


def read(q: Tensor, s: Tensor) -> Tensor:
    return (q[..., None] * s).sum(-2)


@same
def writes_into_a_tensor(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), torch.zeros_like(v)
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o[:, :, i] = read(q[:, :, i], s)
    return o, s


@same
def appends_and_stacks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[..., i, :].exp()[..., None] + outer(k[..., i, :], v[..., i, :])
        o.append(read(q[..., i, :], s))
    return torch.stack(o, dim=2)


@same
def slices_and_concatenates(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i : i + 1].exp().transpose(-1, -2) + k[:, :, i : i + 1].transpose(-1, -2) @ v[:, :, i : i + 1]
        o.append(q[:, :, i : i + 1] @ s)
    return torch.cat(o, 2), s


@same
def twice_in_a_row(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    o = appends_and_stacks(q, k, v, g)
    return writes_into_a_tensor(q, k, o, g)[0]


@different
def goes_by_parity(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i]) * (2 if i % 2 else 1)
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def another_last_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s) if i < q.shape[2] - 1 else v[:, :, i])
    return torch.stack(o, 2)


@different
def forgets_in_the_middle(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        if i == 11:
            s = torch.zeros_like(s)
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def breaks_early(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), torch.zeros_like(v)
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o[:, :, i] = read(q[:, :, i], s)
        if i > 12:
            break
    return o, s


@different
def multiplies_by_the_position(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s) * i)
    return torch.stack(o, 2)


@different
def reads_the_token_before(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i - 1], v[:, :, i])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def reads_half_of_the_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i // 2])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def looks_back_at_all(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, : i + 1].sum(2))
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def counts(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o, n = new_state(q, v), [], 0
    for i in range(q.shape[2]):
        n += 1
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s) / n)
    return torch.stack(o, 2)


@different
def changes_an_object(q: Tensor, k: Tensor, v: Tensor, g: Tensor, seen: Any = None) -> Any:
    seen = seen or {"states": 0}
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        seen["states"] = seen["states"] + 1
        o.append(read(q[:, :, i], s) * seen["states"])
    return torch.stack(o, 2)


@different
def other_weights_each(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    weights = [1.0 + 0.1 * j for j in range(q.shape[2])]
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i]) * weights[i]
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def reads_its_list(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2) + o[3][:, :, None]


@different
def returns_its_list(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s))
    return tuple(o)


@different
def collects_half(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        if i % 2:
            o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def two_states(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, n, o = new_state(q, v), torch.ones_like(q[:, :, 0]), []
    for i in range(q.shape[2]):
        n = n * g[:, :, i].exp() + k[:, :, i].abs()
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i]) * n[..., None].tanh()
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def swaps_states(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, t, o = new_state(q, v), new_state(q, v), []
    for i in range(q.shape[2]):
        s, t = t, s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2), t


@different
def detaches_its_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s.detach() * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def parts_without_gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        with torch.no_grad():
            decay = g[:, :, i, :, None].exp()
        s = s * decay + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def clamps_its_state(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = (s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])).clamp(-1, 1)
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def keeps_the_last_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o, decay = new_state(q, v), [], g[:, :, 0]
    for i in range(q.shape[2]):
        s = s * decay[..., None].exp() + outer(k[:, :, i], v[:, :, i])
        decay = g[:, :, i]
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2) * decay.sum()


@different
def writes_what_it_reads(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), v.clone()
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o[:, :, i] = read(q[:, :, i], s) + o.mean(2)
    return o


@different
def writes_under_another_name(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), torch.zeros_like(v)
    first = o[:, :, :1]
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o[:, :, i] = read(q[:, :, i], s)
    return o * first


@different
def writes_to_its_input(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, seen = new_state(q, v), g.detach()
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        seen[:, :, i] = 0.5 * seen[:, :, i]
    return s, seen


@different
def writes_part_of_a_tensor(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), torch.ones(*v.shape[:2], v.shape[2] + 6, v.shape[3])
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o[:, :, i] = read(q[:, :, i], s)
    return o


@different
def backwards(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in reversed(range(q.shape[2])):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def hooks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        s.register_hook(lambda grad: grad * 0.5)
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def two_tokens_at_once(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2] - 1):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i + 1])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)
