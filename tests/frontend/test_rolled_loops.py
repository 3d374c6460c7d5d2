"""Loops over tokens are traced once where all steps are one step at consecutive positions, and with all steps where
they are not, or where no op serves for them; results and gradients are eager's."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile._torch._registry import release
from megacpp_compile.frontend import rolled_loops, unbacked_shapes
from megacpp_compile.frontend.rolled_loops import repeat
from megacpp_compile.fx.edit import all_nodes
from tests.frontend.loops_of_steps import DIFFERENT, ONE_STEP, SAME, TOKENS

pytestmark = pytest.mark.usefixtures("fresh", "eager_backend")


def batches(step):
    """`step`, of whose operands the batch is a symbol."""

    def marked(*inputs):
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
        return step(*inputs)

    return marked


def drawn(tokens=TOKENS):
    q, k, v, g = (torch.randn(2, 3, tokens, 4) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v, -g.abs())]


def results(f, inputs):
    outputs = f(*(x * 1 for x in inputs))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = torch.autograd.grad(sum(o.square().sum() for o in outputs), inputs, allow_unused=True)
    return [*outputs, *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True))]


def compiled(f, tokens=TOKENS, dynamic_batch=False, **options):
    """(the report, marks of the loops that are compiled from a few steps) of `f`, held to eager."""
    inputs, short = drawn(tokens), []
    before = rolled_loops.check
    step = torch.compile(f, backend="megacpp", options={"rolled_loops": True} | options)
    with pytest.MonkeyPatch.context() as patch, megacpp_compile.record() as report:

        def check(gm, rewritten):
            before(gm, rewritten)
            short.extend(rolled_loops.short(gm))

        patch.setattr(rolled_loops, "check", check)
        found = results(batches(step) if dynamic_batch else step, inputs)
    for one, other in zip(found, results(f, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * max(float(other.detach().abs().max()), 1e-3))
    return report, short


# What is stacked of a list has sizes of its own.
ALL_STEPS_OF_A_SECOND_LENGTH = {"lists_what_it_makes_first"}
# Of these an op is found in the one step alone, not among all steps, which older torch traces of a second length.
BACKWARDS = {"backwards", "writes_backwards"}


@pytest.mark.parametrize("name", SAME)
def test_is_traced_once_and_a_second_length_too(name):
    """Dynamo has a symbol for the tokens of each tensor then, with which positions are compared; it is little longer than
    the first, as some loops are traced with all its steps."""
    report, short = compiled(SAME[name])
    assert short and {site.pass_name for site in report.sites} == {"token_loop"}
    assert len(report.sites) == 1 + (name == "twice_in_a_row")
    report, short = compiled(SAME[name], TOKENS + 4)
    assert bool(short) == (name not in ALL_STEPS_OF_A_SECOND_LENGTH) or release(torch.__version__) < (2, 13)
    if short or name not in BACKWARDS:
        assert {site.pass_name for site in report.sites} == {"token_loop"}


@pytest.mark.sampled(5, unit=9)
@pytest.mark.parametrize("name", SAME)
def test_batch_that_is_a_symbol_is_traced_once(name):
    """Which each of them is without, too, at two lengths."""
    report, short = compiled(SAME[name], dynamic_batch=True)
    assert short and {site.pass_name for site in report.sites} == {"token_loop"}


class Translated(BaseException):
    """The frame's graph, as Dynamo has made it."""


def nodes_translated(f, tokens):
    """How many nodes Dynamo makes of `f`, a loop over `tokens`, of which one step is to be in the graph."""

    def stop(gm):
        raise Translated(len(all_nodes(gm)))

    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Translated) as seen:
        patch.setattr(unbacked_shapes, "repeated", stop)
        torch.compile(f, backend="megacpp", options={"rolled_loops": True})(*(x * 1 for x in drawn(tokens)))
    return seen.value.args[0]


LISTS = ("lists_its_parts_first", "lists_what_it_makes_first", "beside_a_list_that_is_read")


@pytest.mark.parametrize("name", [n for n in (*SAME, *ONE_STEP) if n not in LISTS])
def test_graph_does_not_grow_with_tokens(name):
    f = (SAME | ONE_STEP)[name]
    assert nodes_translated(f, TOKENS) == nodes_translated(f, 5 * TOKENS)


@pytest.mark.parametrize("name", ONE_STEP)
def test_what_is_no_op_is_eager(name):
    _, short = compiled(ONE_STEP[name])
    assert not short


def checkpointed(f):
    return lambda *inputs: checkpoint(f, *inputs, use_reentrant=False)


def test_checkpointed_block_is_traced_once():
    f, tagged = checkpointed(SAME["zips_unbound_tensors"]), []
    before = rolled_loops.check
    with pytest.MonkeyPatch.context() as patch:

        def check(gm, rewritten):
            before(gm, rewritten)
            tagged.extend("recompute" in n.meta for n in rewritten.graph.nodes if "megacpp." in str(n.target))

        patch.setattr(rolled_loops, "check", check)
        report, short = compiled(f)
    assert short and [site.pass_name for site in report.sites] == ["token_loop"] and tagged and all(tagged)
    assert nodes_translated(f, TOKENS) == nodes_translated(f, 5 * TOKENS)


@pytest.mark.parametrize("name", ["goes_by_parity", "reads_its_parts_again"])
def test_checkpointed_block_is_traced_step_by_step(name):
    _, short = compiled(checkpointed(DIFFERENT[name]))
    assert not short


@pytest.mark.sampled(5, unit=9)
@pytest.mark.parametrize("name", DIFFERENT)
def test_is_traced_step_by_step(name):
    _, short = compiled(DIFFERENT[name])
    assert not short


def test_explain_looks_at_a_few_steps():
    options = {"rolled_loops": True}
    report = megacpp_compile.explain(SAME["appends_and_stacks"], *drawn(), options=options)
    assert [site.pass_name for site in report.sites] == ["token_loop"]
    report = megacpp_compile.explain(DIFFERENT["goes_by_parity"], *drawn(), options=options)
    assert not report.sites and "step-by-step" in {miss.tag for miss in report.misses}


def test_says_which_loop_is_traced_step_by_step():
    report, _ = compiled(DIFFERENT["goes_by_parity"])
    (miss,) = [m for m in report.misses if m.tag == "step-by-step"]
    assert "loops_of_steps.py" in miss.source and "position" in miss.reason


@pytest.mark.parametrize(
    "name, words",
    [("both_ways", "forwards"), ("backwards_over_a_part", "part by part"), ("returns_its_list", "appends to"),
     ("lists_its_results", "comprehension"), ("writes_part_of_a_tensor", "part by part")],
)  # fmt: skip
def test_says_why(name, words):
    report, _ = compiled(DIFFERENT[name])
    (miss,) = [m for m in report.misses if m.tag == "step-by-step"]
    assert "loops_of_steps.py" in miss.source and words in miss.reason


def test_parts_in_the_opposite_order():
    x = torch.randn(3, 12)
    for count, expected in ((12, x.flip(1)), (4, x.unflatten(1, (4, 3)).flip(1).flatten(1))):
        graph = torch.fx.Graph()
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
        graph.output(repeat._flipped(graph, graph.placeholder("x"), 1, count, fake, {}))
        assert torch.equal(torch.fx.GraphModule(torch.nn.Module(), graph)(x), expected)


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.behind = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, q, k, v, g):
        return self.behind(SAME["appends_and_stacks"](self.before(q), k, v, g))


@pytest.mark.parametrize("cuts", [True, False])
def test_module_of_ddp(one_rank, cuts):
    """Where Dynamo cuts its graph between buckets, loops are traced with all steps, and the report says so once."""
    with torch._dynamo.config.patch(optimize_ddp=cuts):
        report, short = compiled(torch.nn.parallel.DistributedDataParallel(Blocks(), bucket_cap_mb=25))
    told = [m.reason for m in report.misses if m.tag == "step-by-step"]
    assert {site.pass_name for site in report.sites} == {"token_loop"}
    assert (bool(short), len(told)) == (not cuts, cuts) and all("optimize_ddp" in reason for reason in told)
