"""Lays parameters out over several XLA devices, as a `config.sharding.ShardingPlan` says.

`pinning.py` marks tensors with the plan's partition specs, `layout.py` gathers a parameter where it is used, and
`gemms.py` keeps batch and heads of a batched GEMM as two dimensions, since XLA cannot shard them merged into one.
`sequences.py` says which part of every sequence a rank has.
"""

from megacpp_compile.sharding.pinning import apply, constructing, pin

__all__ = ["apply", "constructing", "pin"]
