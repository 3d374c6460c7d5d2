"""Copies between a device and pinned main memory that run beside the device's other work.

A device has one stream for them, so that they are done in the order they were asked for. What is read back is asked for
before it is needed: backward needs values in the reverse of the order in which they left, and so each one that is
needed begins the copies of those that left before it, whichever frame they belong to.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

# Bytes that are copied back before backward reads them, but for the first value, which is copied at any size: 1.2 ms of
# PCIe. Twice as much costs more time than it hides: 67.4 instead of 66.3 ms (65.2 without copies, six layers, an H200).
AHEAD = 1 << 26


class HostCopies:
    """Those of one device. On a CPU there is no stream, and each copy is done when its call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # By address in main memory: what is on its way there; in the order in which they left, the values that are
        # there; and those that were asked for before backward needed them.
        self._leaving: dict[int, Any] = {}
        self._away: dict[int, weakref.ref[Tensor]] = {}
        self._early: dict[int, tuple[Tensor, Any]] = {}

    def leave(self, x: Tensor) -> Tensor:
        """`x` in main memory, with its strides: a copy that `left` waits for. `x` has to live until then."""
        there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, pin_memory=self.stream is not None)
        done = self._copy(x, there)
        if place := there.data_ptr():
            self._drop(place)
            self._leaving[place] = done
            self._away[place] = weakref.ref(there, lambda gone: self._forget(place, gone))
        return there

    def left(self, there: Tensor) -> None:
        """What the current stream does from here on comes after the copy to `there`."""
        self._wait(self._leaving.pop(there.data_ptr(), None))

    def ask(self, there: Tensor) -> None:
        """Begin to copy `there` back, if it has not begun."""
        if (place := there.data_ptr()) and place not in self._early:
            self._early[place] = self._copied_back(there)

    def back(self, there: Tensor) -> Tensor:
        """`there` on the device, with its strides, for the current stream; asks for those that left before it."""
        place = there.data_ptr()
        here, done = self._early.pop(place) if place in self._early else self._copied_back(there)
        self._wait(done)
        before = list(self._away)
        before = before[: before.index(place)] if place in self._away else []
        for other in reversed(before):
            asked = sum(x.nbytes for x, _ in self._early.values())
            held = None if other in self._early else self._away[other]()
            if held is None:
                continue
            if not fits(asked, held.nbytes):
                break
            self.ask(held)
        return here

    def early(self) -> int:
        """How many values have been asked for and not been read yet."""
        return len(self._early)

    def _copied_back(self, there: Tensor) -> tuple[Tensor, Any]:
        here = torch.empty_strided(there.shape, there.stride(), dtype=there.dtype, device=self.device)
        return here, self._copy(there, here)

    def _copy(self, x: Tensor, y: Tensor) -> Any:
        """Copy x to y behind what the current stream has been given; what says that it is done."""
        if self.stream is None:
            y.copy_(x)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            y.copy_(x, non_blocking=True)
        return self.stream.record_event()

    def _wait(self, done: Any) -> None:
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def _forget(self, place: int, gone: weakref.ref[Tensor]) -> None:
        if self._away.get(place) is gone:
            self._drop(place)

    def _drop(self, place: int) -> None:
        self._away.pop(place, None)
        self._leaving.pop(place, None)
        here, _ = self._early.pop(place, (None, None))
        if here is not None and self.stream is not None:
            here.record_stream(self.stream)  # nobody waited for its copy


def fits(asked: int, size: int) -> bool:
    """Whether a value of `size` bytes is asked for beside those asked for already, of `asked` bytes."""
    return not asked or asked + size <= AHEAD


_copies: dict[torch.device, HostCopies] = {}


def host_copies(device: torch.device) -> HostCopies:
    """The copies of `device`, in this process."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device not in _copies:
        _copies[device] = HostCopies(device)
    return _copies[device]
