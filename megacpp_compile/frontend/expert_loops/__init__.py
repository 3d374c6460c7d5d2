"""Loops over the experts that have tokens, traced as loops over all of them.

    for e in (counts > 0).nonzero(): ...        if counts[e] == 0: continue        if mask.any(): ...

Dynamo breaks the graph where iteration or a branch depends on data. `ExpertLoopTracer` watches it translate a frame: it
gives such a list one entry for every expert, and goes the way that an expert with tokens goes, and marks both in the
graph (`fx.assumptions`). That is right where an expert without tokens adds nothing and does nothing else. The first is
for matchers to show, on the graph; the second is seen to here (`regions`). Where either fails, the frame is translated
anew without.
"""

from megacpp_compile.frontend.expert_loops.watcher import ExpertLoopTracer

__all__ = ["ExpertLoopTracer"]
