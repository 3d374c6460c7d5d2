"""Which parameter is laid out how over several XLA devices: one plan, and what carries it out.

`plan.py` is what users write: a mesh, and globs over names that give partition specs. `pinning.py` marks tensors with
them, `layout.py` gathers a parameter where it is used, and `products.py` keeps the batch and the heads of a product
apart, which XLA could not cut as one.
"""
