"""Loops over tokens whose steps are one step at consecutive positions, and loops that only look so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOKENS = 16
SAME: dict[str, Callable[..., Any]] = {}  # loops that become an op
ONE_STEP: dict[str, Callable[..., Any]] = {}  # loops whose steps are one step, of what is no op
DIFFERENT: dict[str, Callable[..., Any]] = {}  # loops that stay as they are written
Q = dict[str, Any]


def same(f: Callable[..., Any]) -> Callable[..., Any]:
    SAME[f.__name__] = f
    return f


def one_step(f: Callable[..., Any]) -> Callable[..., Any]:
    ONE_STEP[f.__name__] = f
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


@same
def zips_unbound_tensors(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for q_t, k_t, v_t, g_t in zip(
        q.unbind(2), torch.unbind(k, dim=-2), v.unbind(dim=2), g.exp().unbind(2), strict=False
    ):
        s = s * g_t[..., None] + outer(k_t, v_t)
        o.append(read(q_t, s))
    return torch.stack(o, dim=2), s


@same
def zips_splits_and_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    parts = q.split(1, dim=2), k.chunk(k.shape[2], 2), torch.chunk(v, v.shape[2], dim=2), torch.split(g, 1, 2)
    for q_t, k_t, v_t, g_t in zip(*parts, strict=True):
        s = s * g_t.exp().transpose(-1, -2) + k_t.transpose(-1, -2) @ v_t
        o.append(q_t @ s)
    return torch.cat(o, 2)


@same
def enumerates_a_tuple(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), torch.zeros_like(v)
    for i, k_t in enumerate(k.unbind(2)):
        s = s * g[:, :, i, :, None].exp() + outer(k_t, v[:, :, i])
        o[:, :, i] = read(q[:, :, i], s)
    return o


@same
def enumerates_zipped(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i, (q_t, k_t) in enumerate(zip(q.unbind(2), k.unbind(2), strict=True)):
        s = s * g[:, :, i, :, None].exp() + outer(k_t, v[:, :, i])
        o.append(read(q_t, s))
    return torch.stack(o, dim=2)


@same
def iterates_over_tensors(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for q_t, k_t, v_t, g_t in zip(*(x.transpose(0, 2) for x in (q, k, v, g)), strict=False):
        s = s * g_t.transpose(0, 1)[..., None].exp() + outer(k_t.transpose(0, 1), v_t.transpose(0, 1))
        o.append(read(q_t.transpose(0, 1), s))
    return torch.stack(o, dim=2)


@same
def lists_its_parts_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    keys = [k[:, :, i] for i in range(k.shape[2])]
    s, o = new_state(q, v), []
    for i, (k_t, v_t) in enumerate(zip(keys, v.unbind(2), strict=False)):
        s = s * g[:, :, i, :, None].exp() + outer(k_t, v_t)
        o.append(read(q[:, :, i], s))
    return torch.stack(o, dim=2)


@same
def counts_from_one(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i, v_t in enumerate(v.unbind(2), 1):
        s = s * g[:, :, i - 1, :, None].exp() + outer(k[:, :, i - 1], v_t)
        o.append(read(q[:, :, i - 1], s))
    return torch.stack(o, dim=2)


@same
def backwards(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in reversed(range(q.shape[2])):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@same
def writes_backwards(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), torch.zeros_like(v)
    for i in range(q.shape[2] - 1, -1, -1):
        s = s * g[:, :, i : i + 1].exp().transpose(-1, -2) + outer(k[:, :, i], v[:, :, i])
        o[:, :, i] = read(q[:, :, i], s)
    return o, s


@same
def lists_what_it_makes_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    keys = torch.stack([k[:, :, i] * g[:, :, i].tanh() for i in range(k.shape[2])], 2)
    return appends_and_stacks(q, keys, v, g)


@same
def beside_a_list_that_is_read(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    keys: list[Tensor] = []
    for i in range(k.shape[2]):
        keys.append(k[:, :, i].tanh())
    return appends_and_stacks(q, torch.stack(keys, 2) + keys[3][:, :, None], v, g)


@one_step
def goes_in_steps_of_its_size(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    q, k, v, g = (x.flatten(2) for x in (q, k, v, g))
    s, o, d = q.new_zeros(*q.shape[:2], 4, 4), [], 4
    for i in range(0, q.shape[2], d):
        s = s * g[:, :, i : i + d, None].exp() + outer(k[:, :, i : i + d], v[:, :, i : i + d])
        o.append(read(q[:, :, i : i + d], s))
    return torch.stack(o, dim=2)


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
def both_ways(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2]):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, q.shape[2] - 1 - i])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def backwards_from_the_last_but_one(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in range(q.shape[2] - 2, -1, -1):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i + 1])
        o.append(read(q[:, :, i], s))
    return torch.stack([*o, v[:, :, 0]], 2)


@different
def backwards_over_a_part(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o, x = new_state(q, v), [], torch.cat((k, k), 2)
    for i in reversed(range(q.shape[2])):
        s = s * g[:, :, i, :, None].exp() + outer(x[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s))
    return torch.stack(o, 2)


@different
def backwards_from_one_before_zero(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i in reversed(range(q.shape[2])):
        s = s * g[:, :, i - 1, :, None].exp() + outer(k[:, :, i - 1], v[:, :, i - 1])
        o.append(read(q[:, :, i - 1], s))
    return torch.stack(o, 2)


@different
def backwards_put_in_front(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), list[Tensor]()
    for i in reversed(range(q.shape[2])):
        s = s * g[:, :, i, :, None].exp() + outer(k[:, :, i], v[:, :, i])
        o.append(read(q[:, :, i], s))
    o.reverse()
    return torch.stack(o, 2)


@different
def lists_its_results(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    return torch.stack([read(q[:, :, i], outer(k[:, :, i], v[:, :, i] * g[:, :, i])) for i in range(q.shape[2])], 2)


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


@different
def zips_shorter_ones(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for k_t, v_t in zip(k.unbind(2), torch.cat((v, v), 2).unbind(2), strict=False):
        s = s * g[:, :, 0, :, None].exp() + outer(k_t, v_t)
        o.append(s.sum(-1))
    return torch.stack(o, 2)


@different
def starts_behind_the_first(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    keys = iter(torch.cat((k, k[:, :, :1]), 2).unbind(2))
    s = s + next(keys)[..., None]
    for k_t, v_t in zip(keys, v.unbind(2), strict=False):
        s = s * g[:, :, 0, :, None].exp() + outer(k_t, v_t)
        o.append(s.sum(-1))
    return torch.stack(o, 2)


@different
def zips_another_order(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for k_t, v_t, g_t in zip(k.unbind(2), v.unbind(2)[::-1], g.unbind(2), strict=False):
        s = s * g_t[..., None].exp() + outer(k_t, v_t)
        o.append(s.sum(-1))
    return torch.stack(o, 2)


@different
def takes_every_other(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i, k_t in zip(range(0, 2 * TOKENS, 2), k.unbind(2), strict=False):
        s = s * g[:, :, i // 2, :, None].exp() + outer(k_t, v[:, :, i // 2])
        o.append(s.sum(-1))
    return torch.stack(o, 2)


@different
def changes_one_of_its_parts(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    keys = list(k.unbind(2))
    keys[3] = keys[4]
    s, o = new_state(q, v), []
    for k_t, v_t, g_t in zip(keys, v.unbind(2), g.unbind(2), strict=False):
        s = s * g_t[..., None].exp() + outer(k_t, v_t)
        o.append(s.sum(-1))
    return torch.stack(o, 2)


@different
def cuts_without_gradients(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    with torch.no_grad():
        keys = k.unbind(2)
    s, o = new_state(q, v), []
    for k_t, v_t, g_t in zip(keys, v.unbind(2), g.unbind(2), strict=False):
        s = s * g_t[..., None].exp() + outer(k_t, v_t)
        o.append(s.sum(-1))
    return torch.stack(o, 2)


@different
def has_a_shorter_last_part(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, x = new_state(q, v), torch.cat((k, k, k[:, :, :1]), 2)
    for i, x_t in enumerate(x.split(2, 2)):
        s = s * g[:, :, i % TOKENS, :, None].exp() + x_t.sum(2)[..., None]
    return s


@different
def takes_from_an_iterator_in_a_list(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o, numbers = new_state(q, v), [], [iter(range(100))]
    for k_t, v_t, g_t in zip(k.unbind(2), v.unbind(2), g.unbind(2), strict=False):
        s = s * g_t[..., None].exp() + outer(k_t, v_t) * next(numbers[0])
        o.append(s.sum(-1))
    return torch.stack(o, 2)


@different
def takes_from_its_own_iterator(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o, numbers = new_state(q, v), [], iter(range(2 * q.shape[2]))
    for i in numbers:
        s = s * g[:, :, i // 2, :, None].exp() + outer(k[:, :, i // 2], v[:, :, i // 2])
        next(numbers)
        o.append(read(q[:, :, i // 2], s))
    return torch.stack(o, 2)


@different
def weighs_by_an_enumerated_number(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o = new_state(q, v), []
    for i, (k_t, v_t, g_t) in enumerate(zip(k.unbind(2), v.unbind(2), g.unbind(2), strict=False)):
        s = s * g_t[..., None].exp() + outer(k_t, v_t) * (i + 1)
        o.append(s.sum(-1))
    return torch.stack(o, 2)


@different
def reads_its_parts_again(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    s, o, keys = new_state(q, v), [], k.unbind(2)
    for k_t, v_t, g_t in zip(keys, v.unbind(2), g.unbind(2), strict=False):
        s = s * g_t[..., None].exp() + outer(k_t, v_t) * keys[3][..., None]
        o.append(s.sum(-1))
    return torch.stack(o, 2)


@different
def overlaps_its_steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    k, g = k.flatten(2), g.flatten(2)
    s, o = q.new_zeros(*q.shape[:2], 4, 4), []
    for i in range(0, 3 * TOKENS, 3):
        s = s * g[:, :, i : i + 4, None].exp() + k[:, :, i : i + 4, None]
        o.append(s.sum(-1))
    return torch.stack(o, 2)
