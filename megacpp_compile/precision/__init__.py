"""Carries a `config.precision.PrecisionPlan` out on modules.

`survey.py` compares a model with the plan, `replace.py` puts Transformer Engine's modules where the plan asks for fp8,
`layer_spec.py` gives classes to build a model from, with plain PyTorch ones of the same signatures in `native.py`, and
`checkpoint.py` chooses how blocks of such modules recompute. Everything that needs Transformer Engine goes through
`engine.py`, which imports it on demand. `wrappers.py` opens fp8 tensors of other packages, and `sentinel.py` finds
where fp8 payloads are widened.
"""
