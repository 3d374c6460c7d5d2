"""Emits `megacpp::linear_cross_entropy` for what losses read of a head's logits."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch.fx import Node, map_arg

from megacpp_compile._torch.ops import aten
from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.fx.size_nodes import size_node
from megacpp_compile.fx.subgraph import inside
from megacpp_compile.fx.walks import reached
from megacpp_compile.lowerings._op import compute_dtype
from megacpp_compile.matchers.linear_cross_entropy.heads import HeadLoss, Output
from megacpp_compile.matchers.linear_cross_entropy.logits import Step
from megacpp_compile.matchers.linear_cross_entropy.reads import Read, Weight
from megacpp_compile.matchers.linear_cross_entropy.rows import RowView, outer, replay


def inputs_of(site: HeadLoss) -> list[Node]:
    """What the op is computed from: the linear's operands, targets, and what chooses rows."""
    linear = site.logits.linear
    views = {view for o in site.outputs for view in o.read.logits.moves()} if site.mask is None else set()
    views |= set(site.logits.moves())
    views |= {view for logits in site.sizes.values() for view in logits.moves()}
    operands = [n for n in (linear.x, linear.w, linear.b) if n is not None]
    operands += [step.tensor for step in site.logits.steps if step.tensor is not None]
    operands += [*site.targets, *(weight.tensor for weight in site.of_targets.weights)]
    operands += [site.mask] if site.mask is not None else []
    sized = _of_sizes(site.sizes)
    chosen = [n for view in views for n in view.chosen_by()]
    read = reached(chosen, lambda n: [a for a in n.all_input_nodes if a not in site.sizes] if n in sized else [])
    return list(dict.fromkeys([*operands, *sorted(n for n in read if n not in sized)]))


def sizes_read_elsewhere(site: HeadLoss, inputs: list[Node]) -> list[Node]:
    """The sizes of logits that more is computed from than what `site` reads."""
    plain = inside(inputs, [output.read.node for output in site.outputs])
    return [size for size in site.sizes if not plain.issuperset(size.users)]


def _of_sizes(sizes: Iterable[Node]) -> set[Node]:
    """`sizes` and what is computed from them, up to what reads tensors."""
    def numbers(nodes: Iterable[Node]) -> list[Node]:
        return [n for n in nodes if not isinstance(value(n), torch.Tensor)]

    return set(reached(numbers(sizes), lambda n: numbers(n.users)))


def emit(build: Builder, site: HeadLoss, sizes: list[Node], gradients: Container[Node]) -> tuple[Node, list[Node]]:
    """(the op's node, the nodes that stand for the outputs of `site`, for its blanks and for `sizes`)."""
    linear, read = site.logits.linear, site.of_targets
    rows = _Rows(build, site)
    dtype = value(linear.node).dtype
    x = build.cast(_flat(build, rows.of_x(site.logits.moves())), dtype)
    b = None if linear.b is None else build.cast(linear.b, dtype)
    x, w, b = _after_steps(build, site.logits.steps, x, linear.weight(build), b)
    target = _target(build, site, x)
    weight = _weight(build, site, x)
    tensors = [(step.kind, step.tensor) for step in site.logits.steps if step.tensor is not None]
    sources = {
        "x": [linear.x, *(t for kind, t in tensors if kind != "plus")], "w": [linear.w],
        "b": [n for n in (linear.b, *(t for _, t in tensors)) if n is not None and b is not None],
    }  # fmt: skip
    trained = [letter for letter, nodes in sources.items() if any(n in gradients for n in nodes)]
    node = build(
        torch.ops.megacpp.linear_cross_entropy.default, x, w, b, target, weight, read.ignore_index,
        read.label_smoothing, site.logits.scale, site.logits.softcap, 0.0, "sum" if site.summed else "none",
        "".join(trained) if site.summed else "", *read.part,
    )  # fmt: skip
    results = _Results(build, site, rows, node, target, (x, w, b))
    blanks = [_blank(build, one, linear.x) for one in site.blanks]
    return node, [*map(results.of, site.outputs), *blanks, *map(rows.size, sizes)]


def _blank(build: Builder, node: Node, x: Node) -> Node:
    """The new tensor that `node` makes from logits, from x."""
    like = value(node)
    return build(node.target, x, *node.args[1:], **{**node.kwargs, "dtype": like.dtype, "device": like.device})


def _flat(build: Builder, x: Node) -> Node:
    """x as [n, h]."""
    dims = value(x).dim()
    if dims == 1:
        return build(aten.unsqueeze.default, x, 0)
    return x if dims == 2 else build(aten.flatten.using_ints, x, 0, -2)


def _after_steps(
    build: Builder, steps: tuple[Step, ...], x: Node, w: Node, b: Node | None
) -> tuple[Node, Node, Node | None]:
    """Hidden states, weight and bias of a linear whose output is that of x, w and b behind `steps`."""
    for step in steps:
        if step.view is not None:
            ends = step.view.args[2:]
            w = build(aten.slice.Tensor, w, 0, *ends)
            b = None if b is None else build(aten.slice.Tensor, b, 0, *ends)
        elif step.kind == "number":
            b = _plus_number(build, w, b, step.factor)
        elif step.kind == "plus":
            more = build.cast(build(aten.reshape.default, step.tensor, [-1]), value(x).dtype)
            more = more if step.factor == 1 else build(aten.mul.Tensor, more, step.factor)
            b = more if b is None else build(aten.add.Tensor, b, more)
        else:
            one = step.tensor if value(step.tensor).dim() == 0 else build(aten.reshape.default, step.tensor, [])
            target = aten.mul.Tensor if step.kind == "times" else aten.div.Tensor
            x, b = build(target, x, one), None if b is None else build(target, b, one)
    return x, w, b


def _plus_number(build: Builder, w: Node, b: Node | None, number: float) -> Node:
    if b is not None:
        return build(aten.add.Tensor, b, number)
    return build(aten.new_full.default, w, [build.size(w, 0)], number)


def _target(build: Builder, site: HeadLoss, x: Node) -> Node:
    """The targets as int64 [n]; where there are none, all are ignored."""
    if not site.targets:
        return build(aten.new_full.default, x, [build.size(x, 0)], site.of_targets.ignore_index, dtype=torch.int64)
    if site.mask is not None:
        others = build(aten.logical_not.default, site.mask)
        chosen = build(aten.masked_fill.Scalar, *site.targets, others, site.of_targets.ignore_index)
        return build.cast(build(aten.reshape.default, chosen, [-1]), torch.int64)
    return build.cast(build.joined([build.flat(t) for t in site.targets]), torch.int64)


def _weight(build: Builder, site: HeadLoss, x: Node) -> Node | None:
    """What each row counts for, [n] in the op's compute dtype; None where all count alike."""

    def of_rows(weight: Weight) -> Node:
        one = build(aten.logical_not.default, weight.tensor) if weight.unless else weight.tensor
        if weight.shape is not None:
            one = build(aten.expand.default, one, [size_node(build, n) for n in weight.shape])
        return build.cast(build(aten.detach.default, build.flat(one)), compute_dtype(value(x)))

    return build.folded(aten.mul.Tensor, map(of_rows, site.of_targets.weights))


class _Rows:
    """The rows of x that logits show, and their sizes."""

    def __init__(self, build: Builder, site: HeadLoss) -> None:
        self.build, self.sizes, self.sized = build, site.sizes, _of_sizes(site.sizes)
        self.made: dict[tuple[RowView, ...], Node] = {(): site.logits.linear.x}
        self.copies: dict[Node, Node] = {}

    def of_x(self, views: tuple[RowView, ...]) -> Node:
        """The rows [..., h] of x that `views` show."""
        if views not in self.made:
            self.made[views] = replay(self.build, views[-1], self.of_x(views[:-1]), self.size)
        return self.made[views]

    def size(self, node: Node) -> Node:
        """`node`, or the same number from sizes of x where it is computed from those of logits."""
        if node in self.sized and node not in self.copies:
            if (logits := self.sizes.get(node)) is not None:
                dim = node.args[1] % value(logits.node).dim()  # type: ignore[operator]
                new = self.build(aten.sym_size.int, self.of_x(logits.moves()), outer(dim, logits.dim))
            else:
                new = self.build(node.target, *map_arg(node.args, self.size), **map_arg(node.kwargs, self.size))
            self.copies[node] = new
        return self.copies.get(node, node)


class _Results:
    """What the op's node says of rows, in the shapes that the plain graph has."""

    def __init__(
        self, build: Builder, site: HeadLoss, rows: _Rows, node: Node, target: Node,
        operands: tuple[Node, Node, Node | None],
    ) -> None:  # fmt: skip
        self.build, self.site, self.rows, self.node, self.target = build, site, rows, node, target
        self.operands = operands
        self.made: dict[Any, Node] = {}

    def of(self, output: Output) -> Node:
        """The node that stands for an output."""
        read, build = output.read, self.build
        if read.reduction != "none":
            new = self._scaled(self._total(read), read.logits.sign)
            return build.cast(new, value(read.node).dtype)
        views = self.site.logits.moves() if output.part is not None else read.logits.moves()
        new = self._shaped(self._of_rows(read), views)
        if read.kind in ("logit", "logsumexp", "mean") and read.logits.offset and not read.logits.normalised:
            new = build(aten.add.Tensor, new, read.logits.offset)
        if output.part is not None:
            new = build(aten.select.int, new, 0, output.part)
        if read.keepdim:
            new = build(aten.unsqueeze.default, new, read.logits.dim)
        return build.cast(new, value(read.node).dtype)

    def _of_rows(self, read: Read) -> Node:
        """What is read of each row, [n]."""
        if read.kind == "logsumexp":
            return self._item(1)
        if read.kind in ("mean", "sum"):
            return self._over_words(read)
        if read.kind == "logit":
            return self._once("logit", lambda: self.build(aten.sub.Tensor, self._item(1), self._item(0)))
        sign = read.logits.sign if read.kind == "loss" else -read.logits.sign
        found = self._scaled(self._item(0), sign)
        return self._once(("exp", sign), lambda: self.build(aten.exp.default, found)) if read.exp else found

    def _over_words(self, read: Read) -> Node:
        """The mean or sum over words: of logits that is a product with the mean of the weight's rows."""
        build, words = self.build, value(self.operands[1]).shape[0]
        mean = self._once("mean of logits", self._mean_logit)
        if read.logits.normalised:
            less = self._once("mean", lambda: build(aten.sub.Tensor, mean, self._item(1)))
            mean = self._scaled(less, read.logits.sign)
        if read.kind == "mean":
            return mean
        if read.logits.offset and not read.logits.normalised:
            mean = build(aten.add.Tensor, mean, read.logits.offset)
        return build(aten.mul.Tensor, mean, words)

    def _mean_logit(self) -> Node:
        build, (x, w, b) = self.build, self.operands
        dtype = compute_dtype(value(x))
        row = build(aten.mean.dim, w, [0], dtype=dtype)
        mean = build(aten.sum.dim_IntList, build(aten.mul.Tensor, build.cast(x, dtype), row), [-1])
        if b is not None:
            mean = build(aten.add.Tensor, mean, build(aten.mean.default, b, dtype=dtype))
        return self._scaled(mean, self.site.logits.scale)

    def _total(self, read: Read) -> Node:
        """The losses' sum over rows, or a mean of them."""
        build = self.build
        if not self.site.summed:
            total = self._once("sum", lambda: build(aten.sum.default, self._item(0)))
        else:
            total = self._item(0)
        if read.reduction == "rows":
            chosen = self.site.mask if read.chosen is None else read.chosen
            return self._once(("rows", chosen), lambda: build(aten.div.Tensor, total, self._rows(chosen)))
        return total if read.reduction == "sum" else self._once("mean", lambda: self._mean(total))

    def _rows(self, chosen: Node | None) -> Any:
        """How many rows there are, or are chosen."""
        if chosen is not None:
            return self.build(aten.sum.default, chosen)
        return self.build.size(self.target, 0)

    def _mean(self, total: Node) -> Node:
        """Over rows that are not ignored."""
        counted = self.build(aten.ne.Scalar, self.target, self.site.of_targets.ignore_index)
        return self.build(aten.div.Tensor, total, self.build(aten.sum.default, counted))

    def _scaled(self, node: Node, factor: float) -> Node:
        if factor == 1:
            return node
        if factor == -1:
            return self._once(("neg", node), lambda: self.build(aten.neg.default, node))
        return self._once((factor, node), lambda: self.build(aten.mul.Tensor, node, factor))

    def _item(self, index: int) -> Node:
        return self._once(index, lambda: self.build.item(self.node, index))

    def _shaped(self, flat: Node, views: tuple[RowView, ...]) -> Node:
        """`flat` [n] with the rows' dimensions under `views`."""
        like = self.rows.of_x(views)
        sizes = [self.build.size(like, d) for d in range(value(like).dim() - 1)]
        if len(sizes) == 1:
            return flat
        return self._once((views, flat), lambda: self.build(aten.reshape.default, flat, sizes))

    def _once(self, key: Any, make: Callable[[], Node]) -> Node:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]
