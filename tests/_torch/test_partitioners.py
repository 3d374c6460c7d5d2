"""A partitioner tells what it saves before it has made both halves, to whom asked, and is as it was then."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners

from megacpp_compile._torch.partitioners import adds_to_what_is_saved, reporting_backward

EXTRACT = partitioners._extract_graph_with_inputs_outputs


def joint():
    """A joint graph, and what a partitioner is called with beside it."""
    found = []

    def partition(graph, inputs, **kwargs):
        found.append((graph, inputs, kwargs))
        return partitioners.min_cut_rematerialization_partition(graph, inputs, **kwargs)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=partition)
    torch.compile(lambda x, w: (x @ w).exp().tanh(), backend=backend)(
        torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    )
    return found[0]


@pytest.mark.parametrize("name", ["min_cut_rematerialization_partition", "default_partition"])
def test_it_tells_once_what_the_backward_takes(name):
    graph, inputs, kwargs = joint()
    told = []
    with reporting_backward(lambda *found: told.append(found)):
        _, backward = getattr(partitioners, name)(graph, inputs, **kwargs)
    ((taken, early),) = told
    names = [n.name for n in taken]
    assert names == [n.name for n in early.find_nodes(op="placeholder")]
    assert {n.name for n in backward.graph.find_nodes(op="placeholder")} <= set(names)
    assert [str(n.target) for n in early.nodes if n.op == "call_function"]
    assert partitioners._extract_graph_with_inputs_outputs is EXTRACT


def test_what_is_raised_ends_it_and_another_thread_tells_nobody():
    graph, inputs, kwargs = joint()
    divide = functools.partial(partitioners.min_cut_rematerialization_partition, graph, inputs, **kwargs)

    def enough(*_):
        raise StopAsyncIteration

    with pytest.raises(StopAsyncIteration), reporting_backward(enough):
        divide()
    assert partitioners._extract_graph_with_inputs_outputs is EXTRACT
    told = []
    with reporting_backward(lambda *found: told.append(found)), ThreadPoolExecutor() as pool:
        assert pool.submit(divide).result()  # it may begin again
    assert not told


def test_settings_that_add_to_what_is_saved():
    assert not adds_to_what_is_saved()
    with torch._inductor.config.patch(post_grad_fusion_options={"activation_quantization_aten_pass": {}}):
        assert adds_to_what_is_saved()
    if hasattr(torch._functorch.config, "enable_activation_offloading"):
        with torch._functorch.config.patch(enable_activation_offloading=True):
            assert adds_to_what_is_saved()
