"""Weights of linears in float8 whose `grad_dtype` is float32: no number of `.grad` was rounded on its way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import megacpp_compile
from megacpp_compile.config.precision import PrecisionPlan
from megacpp_compile.fx.edit import value
from megacpp_compile.lowerings._gemm.float8_support import no_block_scales, no_float8
from megacpp_compile.lowerings.fp8_block_linear import fp8_quantize_tiles
from megacpp_compile.lowerings.fp8_linear import fp8_quantize
from megacpp_compile.remat import tagging
from megacpp_compile.remat.peak import PeakModel
from tests.backends.models import Stack as AnyStack
from tests.backends.models import compiled, options
from tests.lowerings import relative_error
from tests.lowerings.test_fp8_block_linear import widened as widened_by_tiles
from tests.precision.models import Of

pytestmark = [
    pytest.mark.usefixtures("float8"),
    pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="there from torch 2.10 on"),
]

DIM, HIDDEN = 128, 256  # multiples of what every recipe asks for
RECIPES = ("fp8_current", "fp8_delayed", "fp8_block")
ONE, SEVERAL = "its weight's gradient in float32", "weights' gradients in float32"


@pytest.fixture(autouse=True)
def _kernels(request):
    """Left out, unless a test is end to end and does not leave them out itself."""
    if not any(map(request.node.get_closest_marker, ("end_to_end", "cuda"))):
        request.getfixturevalue("no_kernels")


def Stack(blocks=2):
    return AnyStack(blocks, DIM, HIDDEN)


def wide(model):
    """The model, with gradients of all parameters in float32."""
    for p in model.parameters():
        p.grad_dtype = torch.float32
    return model


def gradients(run, model, *batches):
    """{name: what all batches, one after the other, accumulate}."""
    for p in model.parameters():
        p.grad = None
    for x in batches:
        run(x).float().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def rounded(grad):
    """Whether each number is one of bfloat16's."""
    return torch.equal(grad, grad.bfloat16().to(grad.dtype))


def exact(grad):
    """Whether its numbers are float32's, one in 2 ** 16 of which is bfloat16's, too."""
    numbers = grad[grad != 0]
    return grad.dtype == torch.float32 and (numbers != numbers.bfloat16()).float().mean() > 0.99


def in_float32(grads):
    return {name for name, grad in grads.items() if exact(grad)}


# --- the numbers


def of_payloads(x, grad, recipe):
    """dw in float64, of x and the output's gradient as the recipe rounds them."""
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    if recipe == "fp8_block":
        payload, scale = fp8_quantize_tiles(x, 1)  # rounded once more along tokens
        again = payload.double().unflatten(1, (-1, 128)) * scale.double()[..., None]
        return widened_by_tiles(grad, 128, 1).t() @ widened_by_tiles(again.flatten(1), 128, 1)
    (gp, gs), (xp, xs) = fp8_quantize(grad, "e4m3"), fp8_quantize(x, "e4m3")
    return (gp.double() * gs.double()).t() @ (xp.double() * xs.double())


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
@pytest.mark.parametrize("asked", [True, False])
def test_nearer_to_the_formula_than_bfloat16_is(rand, recipe, asked):
    """Over four microbatches, each of which would be rounded before it is added, and the sum again."""
    model = nn.Sequential(nn.Linear(DIM, HIDDEN, bias=False, dtype=torch.bfloat16))
    run = compiled(wide(model) if asked else model, recipe)
    want = 0
    for _ in range(4):
        x, grad = rand(2, 128, DIM), rand(2, 128, HIDDEN)
        run(x).backward(grad)
        want = want + of_payloads(x, grad, recipe)
    grad = model[0].weight.grad
    assert grad.dtype == (torch.float32 if asked else torch.bfloat16)
    assert relative_error(grad, want) < 1e-6 if asked else relative_error(grad, want) > 1e-3


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_else_stays_as_it_is(rand, recipe):
    """One step: a gradient in float32, rounded, is the one in bfloat16, and so are output and the input's gradient."""
    model, same = Stack(), wide(Stack())
    x = rand(2, 128, DIM)
    results = []
    for m in (model, same):
        torch._dynamo.reset()
        given = x.clone().requires_grad_()
        y = compiled(m, recipe)(given)
        y.float().square().sum().backward()
        results.append([y.detach(), given.grad, *(p.grad for p in m.parameters())])
    narrow, full = results
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(narrow, full, strict=True))
    assert [t.dtype for t in full] == [torch.bfloat16] * 2 + [torch.float32] * 6
    assert all(map(exact, full[2:]))


@pytest.mark.end_to_end
def test_through_inductor_s_kernels_and_its_caches(rand):
    """The second compilation finds the first one's code; a frame whose parameters ask for none does not."""
    x, grads = rand(128, DIM), []
    for asks in (True, True, False):
        torch._dynamo.reset()
        model = by(F.linear, HIDDEN, DIM)
        grads.append(gradients(compiled(wide(model) if asks else model), model, x)["0.weight"])
    first, second, narrow = grads
    assert exact(first) and torch.equal(first, second) and torch.equal(first.bfloat16(), narrow)


# --- how a step is run


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.end_to_end
@pytest.mark.sampled(5)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("policy", ["none", "auto", "selective", "full", "regions"])
def test_whatever_is_recomputed(rand, recipe, policy):
    model, plain = wide(Stack()), wide(Stack())
    model.checkpointed = policy == "regions"
    more = {} if model.checkpointed else {"policy": policy}
    x = rand(2, 128, DIM)
    got = gradients(compiled(model, recipe, **more), model, x)
    torch._dynamo.reset()
    want = gradients(compiled(plain, recipe), plain, x)
    assert in_float32(got) == set(got)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_symbolic_sizes(rand, no_kernels, recipe):
    model = wide(Stack())
    with megacpp_compile.record() as report:
        got = gradients(compiled(model, recipe, dynamic=True), model, *(rand(n, 128, DIM) for n in (2, 3, 5)))
    assert in_float32(got) == set(got)
    assert len(report.frames) == 1


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.end_to_end
def test_equal_blocks_share_code(rand):
    """Whose parameters may ask for another dtype: they have that, of what the first one's code writes."""
    model, x = wide(Stack(4)), rand(2, 128, DIM)
    last = model.blocks[3].down.weight
    last.grad_dtype = torch.bfloat16
    with megacpp_compile.record() as report:
        got = gradients(megacpp_compile.compile(model, options=options("fp8_current")), model, x)
    assert any(frame.blocks == 4 for frame in report.frames)
    assert in_float32(got) == set(got) - {"blocks.3.down.weight"}
    assert got["blocks.3.down.weight"].dtype == torch.bfloat16


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.end_to_end
@pytest.mark.parametrize("policy", [None, "selective"])
def test_changed_behind_the_first_step(rand, policy):
    """Nothing is compiled anew: a gradient in float32 is rounded for who wants it so, one in bfloat16 is cast."""
    model, x = wide(Stack(1)), rand(2, 128, DIM)
    run = compiled(model, **({"policy": policy} if policy else {}))
    first = gradients(run, model, x)
    for dtype in (torch.bfloat16, torch.float16, None):
        for p in model.parameters():
            p.grad, p.grad_dtype = None, dtype
        again = gradients(run, model, x)
        assert all(torch.equal(again[name], first[name].to(dtype or torch.float32)) for name in first), dtype

    torch._dynamo.reset()
    late = Stack(1)
    run = compiled(late)
    gradients(run, late, x)
    for p in late.parameters():
        p.grad = None
    got = gradients(run, wide(late), x)
    assert all(g.dtype == torch.float32 and rounded(g) for g in got.values())
    assert all(torch.equal(got[name], first[name].bfloat16().float()) for name in got)


def test_a_frame_of_a_leaf_that_is_called_with_another_tensor(rand):
    """Which is none: it has its gradient in its own dtype."""
    w = rand(HIDDEN, DIM).requires_grad_()
    w.grad_dtype = torch.float32
    plan = PrecisionPlan(roles=(("other", "fp8_current"),), gate=False)
    run, x = torch.compile(F.linear, backend="megacpp", options={"precision": plan}), rand(128, DIM)
    run(x, w).float().sum().backward()
    assert exact(w.grad)
    computed = w.detach().requires_grad_() * 1
    computed.retain_grad()
    run(x, computed).float().sum().backward()
    assert torch.equal(computed.grad, w.grad.bfloat16())


def test_a_plan_has_gradients_in_their_size(rand, monkeypatch):
    sizes, predicted = [], tagging.predicted

    def watched(graph, *args):
        sizes.append(sorted(str(value(n).dtype) for n in PeakModel(graph).gradients))
        return predicted(graph, *args)

    monkeypatch.setattr(tagging, "predicted", watched)
    model = wide(Stack(1))
    with megacpp_compile.record():
        gradients(compiled(model, policy="selective"), model, rand(2, 128, DIM))
    assert sizes == [["torch.float32"] * 3]


# --- how a weight comes to its linear


def by(call, *shape):
    """`call(x, weight)` of one weight; a rule of a plan matches no model's root."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, dtype=torch.bfloat16) / 8)
    return nn.Sequential(Of(lambda m, x: call(x, m.weight), weight=weight))


WAYS = {
    "as_in_by_out": (lambda x, w: x @ w, DIM, HIDDEN),
    "turned": (lambda x, w: F.linear(x, w.t()), DIM, HIDDEN),
    "of_three_dimensions": (lambda x, w: F.linear(x, w.view(HIDDEN, DIM)), 2, HIDDEN // 2, DIM),
    "permuted": (lambda x, w: F.linear(x, w.permute(1, 0, 2).reshape(HIDDEN, DIM)), HIDDEN // 2, 2, DIM),
    "squeezed": (lambda x, w: F.linear(x, w.squeeze(0)), 1, HIDDEN, DIM),
    "cast_up_and_down": (lambda x, w: F.linear(x, w.float().view(HIDDEN, DIM).bfloat16()), HIDDEN // 2, 2, DIM),
    "cloned": (lambda x, w: F.linear(x, w.clone()), HIDDEN, DIM),
    "read_twice": (lambda x, w: F.linear(x, w) + F.linear(x * 2, w).tanh(), HIDDEN, DIM),
    "read_by_others_too": (lambda x, w: F.linear(x, w) * w.mean(1), HIDDEN, DIM),
    "as_parts": (lambda x, w: [F.linear(x, q) * F.linear(x, k) for q, k in [w.chunk(2)]][0], 2 * DIM, DIM),
    "as_uneven_parts": (lambda x, w: [F.linear(x, a).sum() + F.linear(x, b) for a, b in [w.split([16, DIM])]][0],
                        16 + DIM, DIM),
    "as_parts_of_which_one_is_unread": (lambda x, w: F.linear(x, w.chunk(2)[1]), 2 * DIM, DIM),
}  # fmt: skip


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_moved_on_its_way(rand, way):
    """Neither casts nor moves nor sums on the way back leave it rounded; rounded, it is what it would be, or the sum of
    such."""
    model, plain = wide(by(*WAYS[way])), by(*WAYS[way])
    x = rand(128, DIM)
    with megacpp_compile.record() as report:
        got = gradients(compiled(model), model, x)["0.weight"]
    torch._dynamo.reset()
    want = gradients(compiled(plain), plain, x)["0.weight"]
    assert exact(got)
    assert relative_error(got, want) < 2**-8
    assert all(site.note.endswith((ONE, SEVERAL)) for site in report.sites) and report.sites


def test_cast_on_its_way(rand):
    """Computed in float16 by autocast: cast to that in forward, and back in backward."""
    model, x = wide(by(F.linear, HIDDEN, DIM)), rand(128, DIM)
    with torch.autocast("cpu", dtype=torch.float16):
        y = compiled(model)(x)
    assert y.dtype == torch.float16
    y.float().square().sum().backward()
    grad = model[0].weight.grad
    assert exact(grad) and (grad != grad.half()).float().mean() > 0.9


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.end_to_end
def test_linears_that_share_a_gemm(rand, monkeypatch):
    """Those whose gradients have one dtype do, and each has its rows of what the GEMM writes."""

    def joined():
        torch.manual_seed(0)
        parts = {name: nn.Linear(DIM, n, dtype=torch.bfloat16) for name, n in (("q", DIM), ("k", 16), ("v", 16))}
        return Of(lambda m, x: torch.cat([m.q(x).tanh(), m.k(x), m.v(x)], -1), **parts)

    x, plain = rand(2, 128, DIM), joined()
    want = gradients(compiled(plain), plain, x)
    for other, notes in ((None, [f"3 linears, one in backward; {SEVERAL}"]),
                         ("v", [f"2 linears, one in backward; {SEVERAL}", ""])):  # fmt: skip
        torch._dynamo.reset()
        model = wide(joined())
        if other:
            model.v.weight.grad_dtype = torch.bfloat16
        with megacpp_compile.record() as report:
            got = gradients(compiled(model), model, x)
        assert [site.note for site in report.sites] == notes
        assert in_float32(got) == {f"{name}.weight" for name in "qkv" if name != other}
        assert max(relative_error(got[name], want[name]) for name in got) < 0.05  # q's gradient alone has another scale


# --- where nothing changes


@pytest.mark.parametrize("why", ["computed", "frozen", "no_grad", "any_dtype", "in_float32_itself"])
def test_leaves_alone(rand, why):
    """A weight that is computed, whose gradient autograd needs in its own dtype; one that has no gradient, or whose
    `grad_dtype` asks for nothing."""
    call = (lambda x, w: F.linear(x, w * 2)) if why == "computed" else F.linear
    model, x = wide(by(call, HIDDEN, DIM)), rand(128, DIM).requires_grad_()
    weight = model[0].weight
    if why == "any_dtype":
        weight.grad_dtype = None
    if why == "frozen":
        weight.requires_grad_(False)
    if why == "in_float32_itself":
        model.float()
    recording = torch.no_grad() if why == "no_grad" else torch.enable_grad()
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=why == "in_float32_itself")
    with megacpp_compile.record() as report, recording, autocast:
        y = compiled(model)(x)
    assert [site.note for site in report.sites] == [""]
    if y.requires_grad:
        y.float().square().sum().backward()
        assert weight.grad is None if why == "frozen" else rounded(weight.grad)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.end_to_end
def test_a_dtensor_s_gradient_is_rounded_and_cast(rand, one_rank):
    """AOTAutograd hands it out as a DTensor of the parameter's dtype, whatever its local part is."""
    ways = {"blocks.0.gate": ColwiseParallel(), "blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()}
    model = wide(parallelize_module(Stack(1), one_rank, ways))
    with megacpp_compile.record() as report:
        got = gradients(compiled(model), model, rand(2, 128, DIM))
    assert [(site.pass_name, site.note) for site in report.sites] == [("linear", "")] * 3
    assert all(isinstance(grad, DTensor) and grad.dtype == torch.float32 for grad in got.values())
    assert all(rounded(grad.to_local()) and grad.to_local().any() for grad in got.values())


def test_a_bias_and_a_linear_in_bfloat16_stay_as_they_are(rand):
    """Their gradients are rounded within the frame, and cast."""
    plan = PrecisionPlan(rules=(("0", "fp8_current"), ("*", "bf16")), gate=False)
    torch.manual_seed(0)
    model = wide(nn.Sequential(*(nn.Linear(DIM, DIM, dtype=torch.bfloat16) for _ in range(2))))
    run = torch.compile(model, backend="megacpp", options={"precision": plan, "strict": True})
    got = gradients(run, model, rand(2, 128, DIM))
    assert in_float32(got) == {"0.weight"} and {g.dtype for g in got.values()} == {torch.float32}


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.end_to_end
def test_verified_and_told(rand):
    model = wide(Stack(1))
    with megacpp_compile.record() as report:
        got = gradients(compiled(model, "fp8_delayed", verify="each"), model, rand(2, 128, DIM))
    assert in_float32(got) == set(got)
    assert [site.note for site in report.sites] == [ONE] * 3 and str(report).count(ONE.split()[-1]) >= 3


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_a_gpu(rand, recipe):
    """cuBLASLt writes it, in the place of the one in bfloat16."""
    if missing := (no_block_scales if recipe == "fp8_block" else no_float8)(torch.device("cuda")):
        pytest.skip(missing)
    x, grads = rand(4, 128, DIM).cuda(), []
    for asks in (True, False):
        torch._dynamo.reset()
        model = by(F.linear, HIDDEN, DIM).cuda()
        with megacpp_compile.record() as report:
            grads.append(gradients(compiled(wide(model) if asks else model, recipe), model, x)["0.weight"])
        assert [(site.effective, site.note) for site in report.sites] == [("cuda_scaled_mm", ONE if asks else "")]
        assert report.frames[0].backward.get(report.sites[0].op, ["cuda_scaled_mm"]) == ["cuda_scaled_mm"]
    full, narrow = grads
    assert exact(full) and narrow.dtype == torch.bfloat16 and relative_error(full, narrow) < 2**-8
