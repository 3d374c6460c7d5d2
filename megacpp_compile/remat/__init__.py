"""Stage 4: what a training step keeps for its backward, decided on the joint graph by a policy per kind of block.

`policy.py` is what users write; `kinds.py` says which block a node belongs to; `nodes.py` what a node is to remat;
`plan.py` decides what is saved; `tagging.py` tells torch's partitioner, which carries it out.
"""
