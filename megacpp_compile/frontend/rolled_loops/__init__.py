"""Loops whose steps are one step at consecutive positions, traced once and repeated a few times.

    for i in range(tokens): state = state * decay[:, i] + k[:, i] * v[:, i]; o[:, i] = q[:, i] * state

Dynamo unrolls a loop, and whoever comes behind it meets every step. `RolledLoops` watches it translate a frame, and has
one step translated at a position that is a symbol: nothing that it does may depend on where it is. `repeated` puts a
few steps in the graph, with marks (`fx.short_loops`) on what they take and leave, for matchers to find what the loop
computes. Where anything is otherwise, or nothing is found, the frame is translated anew with all steps.
"""

from megacpp_compile.frontend.rolled_loops.repeat import CannotRepeat, check, repeated, rolled, short
from megacpp_compile.frontend.rolled_loops.watcher import RolledLoops

__all__ = ["CannotRepeat", "RolledLoops", "check", "repeated", "rolled", "short"]
