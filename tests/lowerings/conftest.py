"""Random inputs, the same in every run: the seed is the test's own name. And a quicker Triton interpreter."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist

from tests.seeds import Draws

from .agreement import interpreted


@pytest.fixture
def rand(request) -> Draws:
    return Draws(request.node.name, torch.float64)


@pytest.fixture(scope="session", autouse=True)
def _patched_once():
    """The interpreter puts its own functions into `triton.language` for the time of a kernel, and then again at each
    call of a device function inside of it, which changes nothing and takes a third of the time."""
    if not interpreted():
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch_lang = interpreter._patch_lang

    def once(fn):
        langs = [lang for lang in fn.__globals__.values() if inspect.ismodule(lang) and lang in (tl, tl.core)]
        patched = langs and all(lang.range.__module__ == interpreter.__name__ for lang in langs)
        return interpreter._LangPatchScope() if patched else patch_lang(fn)

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(interpreter, "_LangPatchScope"):  # not in every release
            patch.setattr(interpreter, "_patch_lang", once)
        yield


@pytest.fixture
def alone():
    """The name of a group of one rank."""
    if not dist.is_gloo_available():
        pytest.skip("no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()
