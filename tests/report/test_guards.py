"""What Dynamo says of guards that failed, in words."""

from __future__ import annotations

import pytest

from megacpp_compile.report.guards import in_words


@pytest.mark.parametrize(("said", "words"), [
    ("0/1: tensor 'x' size mismatch at index 1. expected 3, actual 5", "x has size 5 in dimension 1, and had 3"),
    ("tensor 'L['x']' dtype mismatch. expected Float, actual Bool", "x is Bool, and was Float"),
    ("0/0: tensor 'x' rank mismatch. expected 2, actual 3", "x has 3 dimensions, and had 2"),
    ("tensor 'x' stride mismatch at index 0. expected 8, actual 1", "x has stride 1 in dimension 0, and had 8"),
    ("tensor 'L['self']._modules['up']._parameters['weight']' requires_grad mismatch. expected requires_grad=1. Guard "
     "failed on a parameter, consider using ...", "self.up.weight requires no gradient, and did"),
    ("tensor 'x' requires_grad mismatch. expected requires_grad=0", "x requires a gradient, and did not"),
    ("tensor 'x' dispatch key set mismatch. expected A, actual B", "`tensor 'x' dispatch key set mismatch. expected A, "
     "actual B` no longer holds"),
    ("GLOBAL_STATE changed: grad_mode ", "grad mode has changed"),
    ("0/2: GLOBAL_STATE changed: grad_mode autocast(cpu)_enabled ", "grad mode, autocast(cpu) enabled has changed"),
    ("0/4: s.adapter == True           # if s.adapter:  # a.py:9 in forward", "`s.adapter == True` no longer holds"),
    ("L['self']._modules['up'].training == True", "`self.up.training == True` no longer holds"),
    ("!0/0/1: L['self']._modules['_fsdp_wrapped_module'].a == 2", "`self.a == 2` no longer holds"),
    ("0/1: ___check_type_id(L['self'], 946712), type=<class 'torch.distributed.fsdp._init.FSDPLayer'>",
     "self is no longer of the class FSDPLayer"),
    ("0/0: mask is None     # if mask is not None: y=y*mask  # a.py:11 in forward", "mask is no longer None"),
    ("expected type of 'L['mask']' to be a tensor type, ' but found <class 'NoneType'>", "mask is NoneType, and was a tensor"),
    ("", "Dynamo does not say why"),
])  # fmt: skip
def test_in_words(said, words):
    assert in_words(said) == words
