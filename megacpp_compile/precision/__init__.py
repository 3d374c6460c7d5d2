"""Which linear runs in which precision: one plan, and what carries it out on modules.

`plan.py` is what users write: globs over names, roles and a gate by shape give a recipe for each linear. `replace.py`
puts Transformer Engine's modules where the plan asks for fp8, `layer_spec.py` gives classes to build a model from, with
plain PyTorch ones of the same signatures in `native.py`, and `checkpoint.py` chooses how such blocks recompute.
Everything that needs Transformer Engine goes through `engine.py`, which imports it on demand.
"""
