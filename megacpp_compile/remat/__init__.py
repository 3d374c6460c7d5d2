"""Rematerialisation: what a training step saves for its backward, decided on the joint graph by a policy.

`config/checkpointing.py` is what users write. `plan.py` has the plain types; `kinds.py` finds the block of every node,
`nodes.py` asks the traits of its op; `planner.py` makes a plan of `decisions.py` (the policy's entries), `solver.py`
(budgets and limits, by `costs.py` and `peak.py`) and `closure.py` (what backward needs); `tagging.py` hands it to
torch's partitioner, `offload.py` moves saved values to main memory.
"""
