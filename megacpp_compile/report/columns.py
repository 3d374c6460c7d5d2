"""What the columns of a report's tables are called, and what of its records each shows."""

from __future__ import annotations

# Section -> its columns: header -> the attributes, or keys, of the record that it shows. A header has their words, so
# that who has read a table knows what to ask the report for; "pass" alone is `pass_name`, being a word of Python's.
FQN = "module (fqn)"
COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {
    "regions": {"modules (fqns)": ("fqns",), "module class": ("module",), "parameters": ("parameters",),
                "treatment": ("treatment",), "reason": ("reason",)},
    "fused": {"pass": ("pass_name",), FQN: ("fqn",), "source": ("source",), "op": ("op",),
              "lowering; note": ("lowering", "note"), "saved before → after": ("saved_before", "saved_after")},
    "recognised, without a lowering": {"kind": ("kind",), FQN: ("fqn",), "source": ("source",)},
    "precision": {"kind": ("kind",), FQN: ("fqn",), "shape": ("shape",), "rule": ("rule",),
                  "requested": ("requested",), "effective": ("effective",), "reason": ("reason",)},
    "attention": {"call": ("call",), FQN: ("fqn",), "source": ("source",), "requested": ("requested",),
                  "effective": ("effective",), "kernel": ("kernel",), "observed": ("observed",),
                  "reason [tag]": ("reason", "tag")},
    "attention, eager calls": {"requested": ("requested",), "effective": ("effective",), "shape": ("shape",),
                               "dtype": ("dtype",), "kind": ("kind",), "calls": ("calls",), "reason": ("reason",)},
    "nearest misses": {"pass": ("pass_name",), FQN: ("fqn",), "source": ("source",), "first node": ("node",),
                       "reason [tag]": ("reason", "tag")},
    "verified on the first call": {"frame": (), "sites": ("sites",), "worst difference": ("difference",),
                                   "tolerance": ("tolerance",), "tensor": ("tensor",), "pass": ("pass_name",),
                                   FQN: ("fqn",)},
    "frames": {"index": ("index",), "name": ("name",), "outcome": ("outcome",), "passes": ("passes",),
               "nodes": ("nodes",), "target": ("target",), "mode": ("mode",), "seconds": ("seconds",)},
    "compiled again": {"frame": (), "name": ("name",), "recompiled as": ("recompiled",)},
    "compile time": {"frame": (), "dynamo": ("dynamo",), "capture": ("capture",), "passes": (),
                     "analysis": ("analysis",), "plan": ("plan",), "lowering": ("lowering",), "code": ("code",),
                     "torch": ("torch",)},
    "costliest pieces of compiling": {"seconds": ("seconds",), "frame": ("frame",), "kind": ("kind",),
                                      "where": ("where",), "what would avoid it": ("avoid",)},
    "policy auto": {"frame": (), "chosen (predicted)": ("chosen",), "the other choices (predicted)": ("other",)},
    "remat": {"frame": (), "kind of block": (), "blocks": ("blocks",), "entries": ("entries",),
              "saved for backward": ("saved",), "computed again": ("again",), "offloaded": ("offloaded",),
              "nodes recomputed": ("recomputed",)},
    "predicted memory at the peak of a step": {"frame": (), "before": ("before",), "step": ("step",),
                                               "predicted": ("predicted",), "limit": ("limit",)},
    "measured memory at the peak of a step": {"before": ("before",), "step": ("step",), "peak": ("peak",),
                                              "predicted step": ("predicted_step",)},
    "sharding": {"frame": (), FQN: ("fqn",), "shape": ("shape",), "spec": ("spec",), "rule": ("rule",),
                 "read by": ("by",)},
}  # fmt: skip
