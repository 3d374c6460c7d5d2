"""Emits `megacpp::linear_cross_entropy` for what losses read of a head's logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from megacpp_compile.fx.edit import Builder, value
from megacpp_compile.matchers.linear_cross_entropy.heads import HeadLoss, Output
from megacpp_compile.matchers.linear_cross_entropy.reads import Read
from megacpp_compile.matchers.linear_cross_entropy.rows import RowView, replay

aten = torch.ops.aten


def inputs_of(site: HeadLoss) -> list[Node]:
    """What the op is computed from: the linear's operands, targets, and what chooses rows."""
    linear, views = site.logits.linear, site.logits.moves()
    chosen = [n for view in views for n in view.chosen_by()]
    operands = (linear.x, linear.w, linear.b, *site.targets, *chosen)
    return list(dict.fromkeys(n for n in operands if n is not None))


def emit(build: Builder, site: HeadLoss, gradients: set[Node]) -> tuple[Node, list[Node]]:
    """(the op's node, the nodes that stand for the outputs of `site`)."""
    linear, read = site.logits.linear, site.of_targets
    operands = (linear.x, linear.w, linear.b)
    chosen = replay(build, site.logits.moves(), linear.x)
    dtype = value(linear.node).dtype
    x, w = build.cast(_flat(build, chosen), dtype), linear.weight(build)
    b = None if linear.b is None else build.cast(linear.b, dtype)
    target = _target(build, site, x)
    trained = [letter for letter, operand in zip("xwb", operands, strict=True) if operand in gradients]
    node = build(
        torch.ops.megacpp.linear_cross_entropy.default, x, w, b, target, None, read.ignore_index, read.label_smoothing,
        site.logits.scale, site.logits.softcap, 0.0, "sum" if site.summed else "none",
        "".join(trained) if site.summed else "",
    )  # fmt: skip
    rows = _Rows(build, node, site, chosen, target)
    return node, [rows.output(output) for output in site.outputs]


def _flat(build: Builder, x: Node) -> Node:
    """x as [n, h]."""
    dims = value(x).dim()
    if dims == 1:
        return build(aten.unsqueeze.default, x, 0)
    return x if dims == 2 else build(aten.flatten.using_ints, x, 0, -2)


def _target(build: Builder, site: HeadLoss, x: Node) -> Node:
    """The targets as int64 [n]; where there are none, all are ignored."""
    if not site.targets:
        return build(aten.new_full.default, x, [_size(build, x, 0)], site.of_targets.ignore_index, dtype=torch.int64)
    flat = [t if value(t).dim() == 1 else build(aten.reshape.default, t, [-1]) for t in site.targets]
    return build.cast(flat[0] if len(flat) == 1 else build(aten.cat.default, flat), torch.int64)


def _size(build: Builder, of: Node, dim: int) -> Any:
    size = value(of).shape[dim]
    return size if isinstance(size, int) else build(aten.sym_size.int, of, dim)


class _Rows:
    """What the op's node says of rows, in the shapes that the plain graph has. chosen: the rows of x [..., h]."""

    def __init__(self, build: Builder, node: Node, site: HeadLoss, chosen: Node, target: Node) -> None:
        self.build, self.node, self.site, self.target = build, node, site, target
        self.shapes = {site.logits.moves(): chosen}
        self.made: dict[Any, Node] = {}

    def output(self, output: Output) -> Node:
        read, build = output.read, self.build
        if read.reduction != "none":
            new = self._scaled(self._total(read.reduction), read.logits.sign)
            return build.cast(new, value(read.node).dtype)
        views = self.site.logits.moves() if output.part is not None else read.logits.moves()
        new = self._shaped(self._of_rows(read), views)
        if output.part is not None:
            new = build(aten.select.int, new, 0, output.part)
        if read.keepdim:
            new = build(aten.unsqueeze.default, new, read.logits.dim)
        return build.cast(new, value(read.node).dtype)

    def _of_rows(self, read: Read) -> Node:
        """What is read of each row, [n]."""
        if read.kind == "logsumexp":
            return self._item(1)
        if read.kind == "logit":
            return self._once("logit", lambda: self.build(aten.sub.Tensor, self._item(1), self._item(0)))
        sign = read.logits.sign if read.kind == "loss" else -read.logits.sign
        return self._scaled(self._item(0), sign)

    def _total(self, reduction: str) -> Node:
        """The losses' sum over rows, or their mean over rows that are not ignored."""
        build = self.build
        if not self.site.summed:
            total = self._once("sum", lambda: build(aten.sum.default, self._item(0)))
        else:
            total = self._item(0)
        return total if reduction == "sum" else self._once("mean", lambda: self._mean(total))

    def _mean(self, total: Node) -> Node:
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
        if views not in self.shapes:
            self.shapes[views] = replay(self.build, views, self.site.logits.linear.x)
        like = self.shapes[views]
        sizes = [_size(self.build, like, d) for d in range(value(like).dim() - 1)]
        if len(sizes) == 1:
            return flat
        return self._once((views, flat), lambda: self.build(aten.reshape.default, flat, sizes))

    def _once(self, key: Any, make: Callable[[], Node]) -> Node:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]
