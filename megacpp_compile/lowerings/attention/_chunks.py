"""`attention` on a CPU, chunk of queries by chunk: scores of a chunk stay in its caches, and keys that none of its
queries sees by distance or document are passed over.

Not a graph: of a chunk each has other keys, which would be code of its own. Scores and what is made of them are
computed in float32, in place; the other GEMMs are in the operands' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from megacpp_compile.lowerings._op import compute_dtype, kernel_op
from megacpp_compile.lowerings.attention._layout import empty_like_tokens
from megacpp_compile.lowerings.attention._sinks import of_rows, sinks_gradient

# Numbers of a chunk's scores, and queries of a chunk at most and at least.
SCORES, MOST, LEAST = 1 << 20, 128, 16


class _Hidden(NamedTuple):
    """bool [queries, end - begin], or for each head: which of the chunk's keys `begin` to before `end` are hidden."""

    away: Tensor
    begin: int
    end: int

    def fill(self, x: Tensor, number: float) -> None:
        """`number` in x [heads, queries, keys] where keys are hidden."""
        x[..., self.begin : self.end].masked_fill_(self.away, number)


class _Form(NamedTuple):
    """What tells scores from products. hidden by distance, document, prefix: -inf; by mask: `fill`."""

    mask: Tensor | None
    bias: Tensor | None
    documents: Tensor | None
    scale: float
    softcap: float
    left: int | None
    right: int | None
    fill: float
    prefix: Tensor | None

    def of_batch(self, b: int) -> _Form:
        def one(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[min(b, t.shape[0] - 1)]

        return self._replace(
            mask=one(self.mask), bias=one(self.bias), documents=one(self.documents), prefix=one(self.prefix)
        )

    def keys(self, first: int, end: int, count: int) -> tuple[int, int]:
        """The first of `count` keys that one of the queries `first` to before `end` may see, and the one after the
        last."""
        begin, stop = 0, count
        if self.left is not None:
            begin = max(first - self.left, 0)
        if self.right is not None:
            stop = min(max(end + self.right, 0 if self.prefix is None else int(self.prefix)), count)
        if self.documents is not None:
            own = self.documents[first:end]
            places = ((self.documents >= own.min()) & (self.documents <= own.max())).nonzero()
            begin, stop = max(begin, int(places[0])), min(stop, int(places[-1]) + 1)
        return begin, max(stop, begin + 1)

    def hidden(self, first: int, end: int, begin: int, stop: int) -> list[_Hidden]:
        """What distance and document hide from the queries `first` to before `end`, of the keys `begin` to `stop`."""
        queries, found = torch.arange(first, end)[:, None], []
        if self.right is not None and (later := max(first + self.right + 1, begin)) < stop:
            keys = torch.arange(later, stop)
            away = keys > queries + self.right
            found.append(
                _Hidden(away if self.prefix is None else away & (keys >= self.prefix), later - begin, stop - begin)
            )
        if self.left is not None and (near := min(end - 1 - self.left, stop)) > begin:
            found.append(_Hidden(torch.arange(begin, near) < queries - self.left, 0, near - begin))
        if self.documents is not None:
            others = self.documents[first:end, None] != self.documents[begin:stop]
            found.append(_Hidden(others, 0, stop - begin))
        return found


class _Chunk(NamedTuple):
    """Some queries of a sequence `i`. rows: which; keys: those that they may see. scores [h, queries, keys]; capped: by
    softcap, as tanh."""

    i: int
    rows: slice
    keys: slice
    scores: Tensor
    capped: Tensor | None
    hidden: list[_Hidden]


def _part(t: Tensor, first: int, end: int, begin: int, stop: int) -> Tensor:
    """Of what broadcasts to [h, t, s]."""
    rows = t if t.shape[1] == 1 else t[:, first:end]
    return rows if t.shape[2] == 1 else rows[..., begin:stop]


def _chunks(q: Tensor, k: Tensor, form: _Form) -> Iterator[_Chunk]:
    """One after the other, with their scores."""
    (b, h, t, _), count, dtype = q.shape, k.shape[2], compute_dtype(q)
    size = max(min(SCORES // max(h * count, 1) // 16 * 16, MOST), LEAST)
    for i in range(b):
        own, wide = form.of_batch(i), k[i].to(dtype)
        for first in range(0, t, size):
            end = min(first + size, t)
            begin, stop = own.keys(first, end, count)
            part = first, end, begin, stop
            queries = _of_groups(q[i, :, first:end].to(dtype) * own.scale, k.shape[1])
            s, capped = (queries @ wide[:, begin:stop].mT).view(h, end - first, stop - begin), None
            if own.softcap != 0:
                capped = s.div_(own.softcap).tanh_()
                s = capped * own.softcap
            if own.bias is not None:
                s += _part(own.bias, *part)
            hidden = own.hidden(*part)
            if own.mask is not None:
                masked = _Hidden(~_part(own.mask, *part), 0, stop - begin)
                masked.fill(s, own.fill)
            for one in hidden:
                one.fill(s, float("-inf"))
            hidden = hidden if own.mask is None else [masked, *hidden]
            yield _Chunk(i, slice(first, end), slice(begin, stop), s, capped, hidden)


def _exp(s: Tensor) -> Tensor:
    """exp(s), in place, with zeros for numbers too small to be normal, which take a CPU several times as long."""
    return torch.threshold_(s, math.log(torch.finfo(s.dtype).tiny), float("-inf")).exp_()


def _of_groups(x: Tensor, groups: int) -> Tensor:
    """[h, rows, d] as [g, h / g * rows, d]."""
    return x.reshape(groups, -1, x.shape[-1])


@kernel_op("query_chunks::attention")
def attention_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], bias: Optional[Tensor], sinks: Optional[Tensor],  # noqa: UP045
    documents: Optional[Tensor], scale: float, softcap: float, left: Optional[int], right: Optional[int], fill: float,  # noqa: UP045
    prefix: Optional[Tensor],  # noqa: UP045  kernel_op reads typing.Optional on every supported torch
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    groups, dtype = k.shape[1], compute_dtype(q)
    out, lse, top = _results(q, k, v, mask, bias)
    form = _Form(mask, bias, documents, scale, softcap, left, right, fill, prefix)
    for i, rows, keys, s, *_ in _chunks(q, k, form):
        most = s.amax(-1)
        if sinks is not None:
            more = of_rows(sinks).expand(lse.shape)[i, :, rows].to(dtype)
            most = torch.maximum(most, more)
        _exp(s.sub_(most[..., None]))
        total = s.sum(-1)
        if sinks is not None:
            total += (more - most).exp()
        made = _of_groups(s.to(v.dtype), groups) @ v[i, :, keys]
        out[i, :, rows] = made.view(*s.shape[:2], -1) / total[..., None]
        lse[i, :, rows] = total.log_()
        if top.numel():
            top[i, :, rows] = most
        else:
            lse[i, :, rows] += most
    return out, lse, top


def _results(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    b, h, t, _ = q.shape
    out = empty_like_tokens(q, h, t, v.shape[-1])
    lse = q.new_empty((b, h, t), dtype=compute_dtype(q))
    return out, lse, lse.new_empty((b, h, t) if mask is not None or bias is not None else (0,))


@torch.library.register_fake("query_chunks::attention")
def _(q, k, v, mask, bias, *_):  # type: ignore[no-untyped-def]
    return _results(q, k, v, mask, bias)


@kernel_op("query_chunks::attention_backward")
def attention_in_chunks_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], bias: Optional[Tensor],  # noqa: UP045
    sinks: Optional[Tensor], documents: Optional[Tensor], out: Tensor, lse: Tensor, top: Tensor, scale: float,  # noqa: UP045
    softcap: float, left: Optional[int], right: Optional[int], fill: float, bias_grad: bool, prefix: Optional[Tensor],  # noqa: UP045
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    groups, dtype = k.shape[1], compute_dtype(q)
    dq, *_, dsinks = found = _gradients(q, k, v, bias, sinks, bias_grad)
    dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (k, v))
    dbias = torch.zeros(bias.shape, dtype=dtype) if bias_grad and bias is not None else None
    rounded = grad.dtype != dtype
    delta = torch.empty_like(lse) if rounded else (grad * out).sum(-1)
    form = _Form(mask, bias, documents, scale, softcap, left, right, fill, prefix)
    for i, rows, keys, p, capped, hidden in _chunks(q, k, form):
        queries, g = (_of_groups(x[i, :, rows], groups) for x in (q, grad))
        if top.numel():
            p.sub_(top[i, :, rows, None])
        _exp(p.sub_(lse[i, :, rows, None]))
        dv[i, :, keys] += _of_groups(p.to(v.dtype), groups).mT @ g
        ds = (g @ v[i, :, keys].mT).to(dtype).view(p.shape)
        if rounded:  # as these products are, which cancel where the same numbers are added up
            delta[i, :, rows] = (ds * p).sum(-1)
        ds.sub_(delta[i, :, rows, None]).mul_(p)
        for one in hidden:  # a key that is hidden has no gradient, be that of its query no number
            one.fill(ds, 0)
        if dbias is not None:
            part = _part(dbias[min(i, dbias.shape[0] - 1)], rows.start, rows.stop, keys.start, keys.stop)
            part += ds.sum_to_size(part.shape)
        if capped is not None:
            ds.mul_(1 - capped.square_())
        ds = _of_groups(ds.mul_(scale).to(q.dtype), groups)
        dq[i, :, rows] = (ds @ k[i, :, keys]).view(*p.shape[:2], -1)
        dk[i, :, keys] += ds.mT @ queries
    found[1].copy_(dk)
    found[2].copy_(dv)
    if dbias is not None:
        found[3].copy_(dbias)
    if sinks is not None:
        dsinks.copy_(sinks_gradient(sinks, lse, top, delta))
    return found


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, bias_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (empty_like_tokens(x, *x.shape[1:]) for x in (q, k, v))
    dbias = bias.new_empty(bias.shape) if bias_grad and bias is not None else q.new_empty(0)
    return dq, dk, dv, dbias, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


@torch.library.register_fake("query_chunks::attention_backward")
def _(grad, q, k, v, mask, bias, sinks, documents, out, lse, top, scale, softcap, left, right, fill, bias_grad, prefix):  # type: ignore[no-untyped-def]
    return _gradients(q, k, v, bias, sinks, bias_grad)
