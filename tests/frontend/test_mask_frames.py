"""Masks of transformers that are a frame of their own: left to eager, which says `is_causal`, under this backend alone."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megacpp_compile

pytestmark = pytest.mark.usefixtures("fresh", "no_kernels")
IDS = torch.arange(24).view(2, 12) % 32
PADDING = torch.ones(2, 12, dtype=torch.long)
PADDING[0, :3] = 0
TWO_DOCUMENTS = torch.cat((torch.arange(5), torch.arange(7)))[None].expand(2, -1)


def model(implementation="sdpa", layers=1):
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    sizes["num_hidden_layers"] = layers
    return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=implementation))


def step(call, parameters, **given):
    """(loss, gradients)"""
    loss = call(input_ids=IDS, labels=IDS, use_cache=False, **given).loss
    return loss.detach(), torch.autograd.grad(loss, parameters)


def between_layers(model):
    """Break the graph before each layer, as FSDP2's hooks do; returns the masks that layers are handed."""
    seen = []

    @torch.compiler.disable
    def look(module, args, kwargs):
        seen.append(kwargs["attention_mask"])

    for layer in model.model.layers:
        layer.register_forward_pre_hook(look, with_kwargs=True)
    return seen


def compared(model, **given):
    """(masks that layers are handed in compiled code, the mask frames that ran in eager), in two steps"""
    wanted = step(model, [*model.parameters()], **given)
    seen = between_layers(model)
    with megacpp_compile.record() as report:
        compiled = torch.compile(model, backend="megacpp")
        for _ in range(2):
            torch.testing.assert_close(step(compiled, [*model.parameters()], **given), wanted)
    return seen, [f for f in report.frames if f.name.startswith("create_causal_mask") and f.left_to == "eager"]


@pytest.mark.parametrize(("layers", "given"), [
    (2, {}), (1, {"attention_mask": torch.ones(2, 12, dtype=torch.long)}),
], ids=["none", "ones"])  # fmt: skip
def test_layers_are_handed_no_mask(layers, given):
    seen, (frame,) = compared(model(layers=layers), **given)
    assert seen == [None] * 2 * layers and "is_causal" in frame.reason and not frame.captured


@pytest.mark.parametrize(("implementation", "given", "left"), [
    ("sdpa", {"attention_mask": PADDING}, 0), ("eager", {}, 0), ("sdpa", {"position_ids": TWO_DOCUMENTS}, 1),
], ids=["padding", "written out", "documents"])  # fmt: skip
def test_masks_that_hide_more_are_handed_on(implementation, given, left):
    seen, frames = compared(model(implementation), **given)
    assert len(seen) == 2 and all(m.shape == (2, 1, 12, 12) for m in seen) and len(frames) == left


def test_the_mask_of_a_whole_graph_is_traced():
    whole = model()
    with megacpp_compile.record() as report:
        step(torch.compile(whole, backend="megacpp", fullgraph=True), [*whole.parameters()])
    assert [f.captured for f in report.frames] == [True]


def test_other_backends_trace_it_as_before():
    """Also where this one has left the same code to eager."""
    both = model()
    seen = between_layers(both)
    for backend in ("megacpp", "eager", "megacpp"):
        step(torch.compile(both, backend=backend), [*both.parameters()])
    assert [m is None for m in seen] == [True, False, True]
