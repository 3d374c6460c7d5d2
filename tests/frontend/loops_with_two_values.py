"""Loops over experts in which a value is the expert's output where it has tokens, and its rows where it has none; and
such in which that makes a difference."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.frontend.loops_over_hits import named


def _tokens_of(indices, e):
    return torch.where(indices == e)


def conditional(asked):
    """A loop in which rows are an expert's output where `asked` of their number."""

    def body(m, x, indices, gates):
        y = torch.zeros_like(x)
        for e, expert in enumerate(m.experts):
            token, choice = _tokens_of(indices, e)
            n, rows = token.numel(), x[token]
            out = expert(rows) if asked(n) else rows
            y.index_add_(0, token, out * gates[token, choice, None])
        return y

    return body


def conditional_argument(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = _tokens_of(indices, e)
        rows = x[token]
        y = y.index_add(0, token, (rows if len(rows) == 0 else expert(rows)) * gates[token, choice, None])
    return y


def output_in_a_name(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = _tokens_of(indices, e)
        if token.shape[0] > 0:
            out = expert(x[token])
        else:
            out = x.new_zeros(0, x.shape[-1])
        y.index_add_(0, token, out * gates[token, choice, None])
    return y


def output_over_the_rows(m, x, indices, gates):
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, choice = _tokens_of(indices, e)
        rows = x[token]
        if token.numel() >= 1:
            rows = expert(rows)
        y.index_add_(0, token, rows * gates[token, choice, None])
    return y


def by_counts(m, x, indices, gates):
    """The number of rows is another than the one that is asked for."""
    y = torch.zeros_like(x)
    for e, n in enumerate(torch.bincount(indices.flatten(), minlength=m.num_experts).tolist()):
        token, choice = _tokens_of(indices, e)
        rows = x[token]
        out = m.experts[e](rows) if n else rows
        y.index_add_(0, token, out * gates[token, choice, None])
    return y


def _sorted(m, x, indices):
    ids = indices.flatten()
    order = ids.argsort()
    counts = torch.bincount(ids, minlength=m.num_experts).tolist()
    return order, counts, x[order // indices.shape[-1]]


def _summed(outs, order, gates):
    outs = torch.cat(outs)
    y = torch.zeros_like(outs)
    y[order] = outs
    return (y.view(*gates.shape, -1) * gates[..., None]).sum(1)


def parts_between_ends(m, x, indices, gates):
    (order, counts, rows), outs, start = _sorted(m, x, indices), [], 0
    for expert, n in zip(m.experts, counts, strict=True):
        part = rows[start : start + n]
        outs.append(expert(part) if n > 0 else part)
        start += n
    return _summed(outs, order, gates)


def parts_of_a_split(m, x, indices, gates):
    (order, counts, rows), outs = _sorted(m, x, indices), []
    for expert, part in zip(m.experts, rows.split(counts), strict=True):
        outs.append(expert(part) if part.shape[0] else part)
    return _summed(outs, order, gates)


FUSE = [*named({"conditional_output": conditional(lambda n: n)}), conditional_argument, output_in_a_name,
        output_over_the_rows, by_counts, parts_between_ends, parts_of_a_split]  # fmt: skip


# --- what is another value


def by_counts_of_the_next(m, x, indices, gates):
    y = torch.zeros_like(x)
    counts = torch.bincount(indices.flatten(), minlength=m.num_experts).tolist()
    for e in range(m.num_experts):
        token, choice = _tokens_of(indices, e)
        rows = x[token]
        out = m.experts[e](rows) if counts[(e + 1) % m.num_experts] else rows
        y.index_add_(0, token, out * gates[token, choice, None])
    return y


def every_token(m, x, indices, gates):
    """All tokens are there, whoever chose the expert."""
    y = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        own = (gates * (indices == e)).sum(-1, keepdim=True)
        n = _tokens_of(indices, e)[0].numel()
        out = expert(x) if n else x
        y = y + out * own + out * 0.1
    return y


def padded(m, x, indices, gates):
    """There is a row where there is no token."""
    y, more = torch.zeros_like(x), x.new_zeros(1, x.shape[-1])
    for e, expert in enumerate(m.experts):
        token, choice = _tokens_of(indices, e)
        rows = F.pad(x[token], (0, 0, 0, 1)) + 1
        out = expert(rows) if token.numel() else rows
        y.index_add_(0, token, out[:-1] * gates[token, choice, None])
        more = more + out[-1:]
    return y + more


def remembered(m, x, indices, gates):
    """A number tells which way was taken."""
    y, idle = torch.zeros_like(x), 0
    for e, expert in enumerate(m.experts):
        token, choice = _tokens_of(indices, e)
        rows = x[token]
        if token.numel():
            out = expert(rows)
        else:
            out, idle = rows, idle + 1
        y.index_add_(0, token, out * gates[token, choice, None])
    return y * (1 + idle)


def one_name_or_the_other(m, x, indices, gates):
    """The expert before this one left its output behind."""
    y, out = torch.zeros_like(x), x[:0]
    for e, expert in enumerate(m.experts):
        token, choice = _tokens_of(indices, e)
        rows = x[token]
        if token.numel():
            out = expert(rows)
            y.index_add_(0, token, out * gates[token, choice, None])
        y = y + out.sum(0, keepdim=True)
    return y


OTHER = [*named({
    "more_than_one": conditional(lambda n: n > 1),  # an expert with one token returns it
    "not_three": conditional(lambda n: n != 3),
}), by_counts_of_the_next, every_token, padded, remembered, one_name_or_the_other]  # fmt: skip
