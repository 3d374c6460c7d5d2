"""A head and its loss without logits: found in every spelling, rewritten, and refused for every reason there is."""

from __future__ import annotations

import copy

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megacpp_compile
from megacpp_compile.config.options import Config
from megacpp_compile.report import replay
from tests.corpus.heads import IGNORED, SPELLINGS, WITHOUT_IGNORED, arguments, build, each_row, flattened
from tests.frames import TOLERANCE, check, check_graph, largest_error, render, run, train

from .conditions import assert_serves, conditions, op_of, sampled
from .contract import assert_autocast, assert_autocast_inside, assert_fires

NAME = "linear_cross_entropy"
BODIES = {body.__name__: body for body in SPELLINGS}


def spelled(name, **options):
    """The corpus' spelling of this name, and its arguments."""
    return build(BODIES[name], **options)


def gradients_of(frames):
    return op_of(frames, NAME).args[-2:]


@sampled(5, "name", BODIES)
def test_fires(name):
    assert_fires(NAME, *spelled(name), SPELLINGS[BODIES[name]])


def test_graph():
    frames = assert_fires(NAME, *spelled("shifted_logits"), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
slice: i64[2, 5] = slice.Tensor(labels, 1, 1, 9223372036854775807)
slice_1: f32[2, 5, 12] = slice.Tensor(hidden, 1, 0, -1)
view: f32[10, 12] = view(slice_1, [-1, 12])
view_1: i64[10] = view(slice, [-1])
linear_cross_entropy: (f32[], f32[10], f32[10, 12], f32[23, 12], f32[0]) = megacpp.linear_cross_entropy(view, proj_weight, None, view_1, None, -100, 0.0, 1.0, None, 0.0, sum, xw)
getitem: f32[] = linear_cross_entropy[0]
ne: b8[10] = ne.Scalar(view_1, -100)
sum: i64[] = sum(ne)
div: f32[] = div.Tensor(getitem, sum)
return [div]""")


def test_graph_of_a_sum():
    frames = assert_fires(NAME, *spelled("per_items", bias=True), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
ne: b8[2, 6] = ne.Scalar(labels, -100)
sum: i64[] = sum(ne)
pad: i64[2, 7] = pad(labels, [0, 1], constant, -100.0)
slice: i64[2, 6] = slice.Tensor(pad, 1, 1, 9223372036854775807)
view: f32[12, 12] = view(hidden, [-1, 12])
view_1: i64[12] = view(slice, [-1])
linear_cross_entropy: (f32[], f32[12], f32[12, 12], f32[23, 12], f32[23]) = megacpp.linear_cross_entropy(view, proj_weight, proj_bias, view_1, None, -100, 0.0, 1.0, None, 0.0, sum, xwb)
getitem: f32[] = linear_cross_entropy[0]
div: f32[] = div.Tensor(getitem, sum)
return [div]""")


def test_graph_of_rows():
    frames = assert_fires(NAME, *spelled("selective_log_softmax"), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
slice: i64[2, 5] = slice.Tensor(labels, 1, 1, 9223372036854775807)
slice_1: f32[2, 5, 12] = slice.Tensor(hidden, 1, 0, -1)
flatten: f32[10, 12] = flatten.using_ints(slice_1, 0, -2)
view: i64[10] = view(slice, [-1])
linear_cross_entropy: (f32[10], f32[10], f32[0], f32[0], f32[0]) = megacpp.linear_cross_entropy(flatten, proj_weight, None, view, None, -100, 0.0, 1.1111111111111112, None, 0.0, none, )
getitem: f32[10] = linear_cross_entropy[1]
getitem_1: f32[10] = linear_cross_entropy[0]
sub: f32[10] = sub.Tensor(getitem, getitem_1)
view_1: f32[2, 5] = view(sub, [2, 5])
unsqueeze: f32[2, 5, 1] = unsqueeze(view_1, 2)
view_2: f32[2, 5] = view(getitem, [2, 5])
select: f32[5] = select.int(view_2, 0, 0)
select_1: f32[5] = select.int(view_2, 0, 1)
squeeze: f32[2, 5] = squeeze.dim(unsqueeze, -1)
stack: f32[2, 5] = stack([select, select_1])
sub_1: f32[2, 5] = sub.Tensor(squeeze, stack)
return [sub_1]""")


def test_graph_of_a_masked_sum():
    frames = assert_fires(NAME, *spelled("masked_sum"), dynamo=True)
    expecttest.assert_expected_inline(render(frames.graph), """\
view: i64[12] = view(labels, [-1])
clamp: i64[12] = clamp(view, 0)
ne: b8[2, 6] = ne.Scalar(labels, -100)
view_1: b8[12] = view(ne, [-1])
view_2: f32[12, 12] = view(hidden, [-1, 12])
detach: b8[12] = detach(view_1)
to_copy: f32[12] = _to_copy(detach, dtype=float32)
linear_cross_entropy: (f32[], f32[12], f32[12, 12], f32[23, 12], f32[0]) = megacpp.linear_cross_entropy(view_2, proj_weight, None, clamp, to_copy, -100, 0.0, 1.0, None, 0.0, sum, xw)
getitem: f32[] = linear_cross_entropy[0]
sum: i64[] = sum(view_1)
div: f32[] = div.Tensor(getitem, sum)
return [div]""")


SUMS = """mean_of_rows masked_sum weighted_log_probabilities mean_of_log_probabilities by_log_of_softmax
    mean_of_chosen_losses sum_of_selected_losses losses_where losses_but_where weighted_positions
    dot_with_weights""".split()


@sampled(3, "name", SUMS)
def test_rows_that_are_added_up_are_a_sum(name):
    assert gradients_of(assert_fires(NAME, *spelled(name))) == ("sum", "xw")


def of_rows(make):
    """What `make(losses, labels, x)` makes of each row's loss, rows being those of all sequences."""

    def body(m, x, labels):
        labels = labels.flatten()
        return make(F.cross_entropy(m.proj(x).flatten(0, 1), labels, reduction="none"), labels, x)

    return body


def of_sequences(make):
    """What `make(losses, labels)` makes of a loss for each sequence and position."""

    def body(m, x, labels):
        return make(F.cross_entropy(m.proj(x).transpose(1, 2), labels, reduction="none"), labels)

    return body


def two_weights(m, x, labels):
    logits = m.proj(x).flatten(0, 1)
    losses = [F.cross_entropy(logits, labels.flatten(), reduction="none") for _ in range(2)]
    return (losses[0] * (labels.flatten() > 4)).sum() + (losses[1] * labels.flatten()).mean()


BY_THEMSELVES = {
    # a weight with a gradient of its own
    "weighted_by_the_trained": of_rows(lambda loss, labels, x: (loss * x.mean(-1).flatten()).sum()),
    "read_twice": of_rows(lambda loss, labels, x: ((loss * (labels > 4)).sum(), loss.detach().amax())),
    # rows count for what their own loss says
    "focal": of_rows(lambda loss, labels, x: ((1 - torch.exp(-loss)).square().detach() * loss).mean()),
    "two_weights": two_weights,
    "another_number_elsewhere": of_rows(lambda loss, labels, x: torch.where(labels > 4, loss, 0.5).sum()),
    "chosen_and_weighted": of_rows(lambda loss, labels, x: (loss[labels > 4] * labels[labels > 4]).sum()),
    "of_each_sequence": of_sequences(lambda loss, labels: loss.sum(-1).square().mean()),
    "chosen_sequences": of_sequences(lambda loss, labels: loss[labels[:, 0] > 11].sum()),
    "mean_of_sums": of_sequences(lambda loss, labels: loss.sum(1).mean()),
    "mean_for_each_count": of_sequences(
        lambda loss, labels: ((loss * (labels != IGNORED)).sum(1) / (labels != IGNORED).sum(1)).mean()
    ),
}


@pytest.mark.parametrize("case", BY_THEMSELVES)
def test_rows_that_count_by_themselves(case):
    assert gradients_of(assert_fires(NAME, *build(BY_THEMSELVES[case]))) == ("none", "")


def weighted_by_another_site(m, x, labels):
    """Each row counts for the loss of the row in front of it."""
    logits = m.proj(x)
    first, second = (F.cross_entropy(part.transpose(1, 2), own, reduction="none") for part, own in
                     ((logits[:, :-1], labels[:, :-1]), (logits[:, 1:], labels[:, 1:])))  # fmt: skip
    return (second * first.detach()).sum(), first


def test_weights_of_another_site():
    frames = assert_fires(NAME, *build(weighted_by_another_site), 2)
    ops = [n for n in frames.graph.graph.nodes if n.target is torch.ops.megacpp.linear_cross_entropy.default]
    assert [n.args[-2] for n in ops] == ["none", "sum"]


WITH_TENSORS = "learned_temperature scaled_by_a_buffer masked_logits one_hot categorical".split()
SOME_WORDS = "padded_words later_words capped_by_a_sigmoid numbers_added".split()
DTYPES = """flattened each_row z_loss smoothed softcapped bias_behind later_words numbers_added by_hand
    smoothed_logits""".split()


@sampled(5, "dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", DTYPES + WITH_TENSORS)
def test_dtypes(name, dtype):
    assert_fires(NAME, *spelled(name, dtype=dtype))


def test_scales_and_biases_in_half():
    """A temperature's gradient is one number of all rows and words: as near float64's as eager's own, twice over."""
    module, args = spelled("bias_behind_a_scale", dtype=torch.bfloat16)
    exact, wide = copy.deepcopy(module).double(), (args[0].detach().double().requires_grad_(), args[1])
    want, eager = train(exact, exact, wide), train(module, module, args)
    frames = run(module, args)
    assert frames.counts[NAME] == 1
    for name, t in want.items():
        error, own = ((r[name].double() - t).abs().max() / t.abs().max() for r in (frames.results, eager))
        assert error <= 2 * own + 2**-8, (name, error, own)


@pytest.mark.parametrize("name", "flattened each_row z_loss sum_over_size selective_log_softmax".split())
def test_verified(name):
    assert check_graph(*spelled(name), Config(strict=True, verify="each")).counts[NAME] == 1


def test_verified_on_what_is_no_number():
    """A NaN in the plain result is no value to be off from; one in ours alone, or an infinity, is."""
    module, (x, labels) = build(flattened)
    x = x.detach().clone()
    x[0, 1] = float("nan")
    frames = run(module, (x.requires_grad_(), labels), Config(verify="each", strict=True))
    assert frames.counts[NAME] == 1
    some = torch.tensor([1.0, float("nan"), float("inf")])
    assert replay._error(some.clone(), some) == replay._error(torch.tensor([1.0, 2.0, float("inf")]), some) == 0
    assert replay._error(torch.tensor([1.0, 2.0, 3.0]), some) == float("inf") == replay._error(some, torch.ones(3))


def args_of(everything, args):
    """Lengths that vary are marked, unless everything does."""
    for t in () if everything else args:
        torch._dynamo.mark_dynamic(t, 1)
    return args


@sampled(5, "everything", [False, True], ids=["length", "everything"])
@pytest.mark.parametrize("name", "flattened each_row z_loss sum_over_size masked_shifted".split())
def test_verified_at_lengths_that_vary(name, everything):
    """Sizes that are inputs of the graph are what they are in the first call."""
    module, args = spelled(name)
    config = Config(strict=True, verify="each")
    frames = check(module, args_of(everything, args), config, dynamic=True if everything else None)
    assert frames.counts[NAME] == 1 and not frames.misses


def test_what_verification_finds_at_lengths_that_vary(monkeypatch):
    from megacpp_compile.lowerings.linear_cross_entropy import reference

    exact = reference.row_losses
    monkeypatch.setattr(reference, "row_losses", lambda *args: 1.01 * exact(*args))
    with pytest.raises(Exception, match="changed output"):
        check(*build(flattened), Config(strict=True, verify="each"), dynamic=True)


@pytest.mark.parametrize(("name", "whole"), [("masked_logits", False), ("hidden_by_their_labels", True)])
def test_masked_rows_through_the_backend(name, whole, no_kernels):
    """How many rows a mask chooses is not asked, so that the graph neither breaks nor waits for a number; of hidden
    states that are chosen, where the user asks for one graph."""
    torch._dynamo.reset()
    module, args = spelled(name)
    with megacpp_compile.record() as report:
        got = train(torch.compile(module, backend="megacpp", fullgraph=whole), module, args)
    assert report.counts[NAME] == 1 and len(report.frames) == 1 and not report.misses
    error, which = largest_error(got, train(module, module, args))
    assert error <= TOLERANCE[torch.float32], (which, error)


@pytest.mark.parametrize("name", "flattened each_row tied smoothed".split())
def test_bias(name):
    assert_fires(NAME, *spelled(name, bias=True))


DYNAMIC = """flattened words_second shifted_logits shifted_labels z_loss selective_log_softmax several_heads sum_over_size
    masked_sum mean_of_rows cap_of_the_model masked_shifted masked_mean_of_rows one_hot_sum bias_behind
    bias_behind_a_scale mean_of_chosen_losses losses_where by_hand by_hand_with_the_largest_again smoothed_by_hand
    smoothed_by_sums""".split()


@sampled(9, "everything", [False, True], ids=["length", "everything"])
@pytest.mark.parametrize("name", DYNAMIC + WITH_TENSORS + SOME_WORDS)
def test_dynamic_lengths(name, everything):
    def args(length):
        return args_of(everything, arguments(length, ignored=BODIES[name] not in WITHOUT_IGNORED.values()))

    module, _ = spelled(name)
    frames = check(module, args(6), dynamic=True if everything else None)
    assert frames.counts[NAME] == SPELLINGS[BODIES[name]], frames.misses
    assert_serves(frames, module, args(9), args(5))


AUTOCAST = """flattened shifted_labels each_row softcapped z_loss padded_words capped_by_a_sigmoid numbers_added
    smoothed_by_hand""".split()


@sampled(5, "name", AUTOCAST + WITH_TENSORS)
def test_autocast(name):
    assert_autocast(NAME, *spelled(name))
    assert_autocast_inside(NAME, *spelled(name))


def test_a_bias_in_float_under_autocast():
    """It is added in float32, and the linear's own in bfloat16."""
    frames = run(*spelled("bias_behind"), around=lambda: torch.autocast("cpu", torch.bfloat16))
    assert frames.tags(NAME) == {"between"} and "no wider dtype" in frames.misses[0].reason


def fewer_labels(m, x, labels):
    """A word of the first rows of the first sequence."""
    return m.proj(x).log_softmax(-1).gather(-1, labels[:1, :-2].clamp(min=0).unsqueeze(-1)).squeeze(-1)


def fewer_labels_of_words_second(m, x, labels):
    logits = m.proj(x).transpose(1, 2)
    picked = logits.gather(1, labels[:, None, :3].clamp(min=0)).squeeze(1)
    return picked - logits.logsumexp(1)[:, :3]


@pytest.mark.parametrize(("body", "count"), [(fewer_labels, 1), (fewer_labels_of_words_second, 2)],
                         ids=["fewer", "words second"])
def test_gather_reads_as_many_rows_as_there_are_labels(body, count):
    assert_fires(NAME, *build(body), count)


def test_lengths_of_labels_that_vary_by_themselves():
    """Nothing in a gather says that there are as many labels as rows: where there are fewer it is right, too."""
    module, args = spelled("mean_of_log_probabilities")
    frames = check(module, args_of(False, args))
    assert frames.counts[NAME] == 1
    others = ((arguments(length)[0], arguments(labelled)[1]) for length, labelled in ((9, 9), (8, 5)))
    assert_serves(frames, module, *others, graphs=None)
    assert len(frames.graphs) <= 2, "compiled again for another length"


def head_under_autocast(m, x, labels):
    """As trainers have it: the model under autocast, the loss outside."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = m.proj(x)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def test_head_under_autocast():
    frames = check(*build(head_under_autocast), tolerance=TOLERANCE[torch.bfloat16])
    assert frames.counts[NAME] == 1, frames.misses


def without_gradients(m, x, labels):
    with torch.no_grad():
        loss = flattened(m, x, labels)
    return loss * x.sum()


def test_gradients_are_made_of_what_is_trained():
    module, args = build(flattened, bias=True)
    assert gradients_of(check_graph(module, args)) == ("sum", "xwb")
    for name, left in (("proj.weight", "xb"), ("proj.bias", "x")):
        module.get_parameter(name).requires_grad_(False)
        assert gradients_of(check_graph(module, args)) == ("sum", left)
    assert gradients_of(check_graph(*build(lambda m, x, labels: flattened(m, x.detach(), labels)))) == ("sum", "w")
    assert gradients_of(check_graph(*build(without_gradients))) == ("sum", "")
    assert gradients_of(check_graph(*build(each_row))) == ("none", "")


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode], ids=lambda f: f.__name__)
def test_inference(around):
    module, (x, labels) = spelled("shifted_labels")
    frames = check(module, (x.detach(), labels), around=around)
    assert frames.counts[NAME] == 1 and gradients_of(frames) == ("sum", "")


def test_all_rows_ignored():
    """A mean of nothing, as eager has it."""
    module, (x, labels) = build(flattened)
    frames = run(module, (x, torch.full_like(labels, IGNORED)))
    assert frames.counts[NAME] == 1 and frames.results["output 0"].isnan()


def losses(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, **options)


def of_each_sequence(m, x, labels):
    counted = labels != IGNORED
    return (losses(m.proj(x), labels, reduction="none").view_as(labels) * counted).sum(1) / counted.sum(1)


def by_hand(m, x, labels):
    counted = (labels != IGNORED).float()
    return ((losses(m.proj(x), labels, reduction="none").view_as(labels) * counted).sum() / counted.sum()).nan_to_num()


# Losses that divide by a count of labels, and make something of none.
OF_NO_LABELS = {
    "mean": lambda m, x, labels: losses(m.proj(x), labels).nan_to_num(),
    "smoothed": lambda m, x, labels: losses(m.proj(x), labels, label_smoothing=0.1).nan_to_num(),
    "chosen": lambda m, x, labels: torch.where((labels != IGNORED).any(), losses(m.proj(x), labels), 0.0),
    "by_hand": by_hand,
    "sequences": lambda m, x, labels: of_each_sequence(m, x, labels).nan_to_num().sum(),
    "sequences_chosen": lambda m, x, labels: torch.where(
        (labels != IGNORED).any(1), of_each_sequence(m, x, labels), 0.0
    ).mean(),
    "sequences_left_out": lambda m, x, labels: of_each_sequence(m, x, labels).nan_to_num().mean(),
    "one_by_one": lambda m, x, labels: sum(
        F.cross_entropy(z, y, ignore_index=IGNORED).nan_to_num() for z, y in zip(m.proj(x), labels, strict=True)
    ),
}


@pytest.mark.parametrize("how_many", ["one", "all"])
@pytest.mark.parametrize("name", OF_NO_LABELS)
def test_gradients_of_sequences_without_labels(name, how_many):
    """As in fine-tuning, where prompts fill the length: eager leaves zeros, whatever the loss is divided by."""
    module, (x, labels) = build(OF_NO_LABELS[name])
    labels = labels.clone()
    labels[: 1 if how_many == "one" else None] = IGNORED
    frames = check(module, (x, labels))
    assert frames.counts[NAME]


def test_counts_every_site_of_a_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, _ = spelled("several_heads")

        def forward(self, x, labels):
            return self.inner(x, labels) + flattened(self.inner, x, labels)

    assert_fires(NAME, Model(), arguments(), 3)


test_conditions = conditions(
    NAME, disabled=lambda: build(flattened), half_in_float=lambda: spelled("shifted_labels", dtype=torch.bfloat16)
)
