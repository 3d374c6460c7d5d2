"""`plain_mla` on stand-ins for Megatron's modules: same parameters and results, one graph, and what stays and why."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import megacpp_compile
from megacpp_compile import replace_linears
from megacpp_compile.adapters.megatron import plain_mla
from megacpp_compile.errors import CompiledTooEarlyError, NotAModuleError

from . import fake_megatron as fake


@pytest.fixture(autouse=True)
def megatron(monkeypatch):
    fake.install(monkeypatch)


def made(te=False, layers=2, **config):
    torch.manual_seed(0)
    return fake.off_one(fake.GPTModel(fake.Config(**config), layers, te))


def ids():
    return torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(1))


def step(model, call=None):
    """The loss and every gradient."""
    model.zero_grad()
    loss = (model if call is None else call)(ids(), labels=ids().roll(-1, 1))
    loss.square().sum().backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def same(got, want, bound=2e-6):
    """Within float32's rounding of the size of each tensor."""
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= bound * b.norm()


@pytest.mark.end_to_end
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("te", "q_lora"), [(False, 24), (True, 24), (True, None)])
def test_one_graph_with_every_site(te, q_lora, no_kernels):
    model = made(te, q_lora_rank=q_lora, apply_rope_fusion=True, bias_activation_fusion=True, bias_dropout_fusion=True)
    want, names = step(model), list(model.state_dict())
    parameters, table = dict(model.named_parameters()), plain_mla(model)
    assert not table.left and list(model.state_dict()) == names
    assert all(p is parameters[n] for n, p in model.named_parameters())
    same(step(model), want)
    with megacpp_compile.record() as report:
        got = step(model, torch.compile(model, backend="megacpp"))
    same(got, want)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    sites = {"down_norm_up": 4 if q_lora else 2, "mla_rope_q": 2, "mla_rope_kv": 2, "linear_cross_entropy": 1}
    assert fake.fired(report) == sites


@pytest.mark.end_to_end
def test_without_it_the_graph_breaks(eager_backend):
    """The stand-in does what the real one does, so that the test above can fail."""
    model = made(layers=1)
    with megacpp_compile.record() as report:
        step(model, torch.compile(model, backend="megacpp"))
    assert counters["stats"]["unique_graphs"] > 1 and report.counts["down_norm_up"] == 0


def test_classes_stay_what_they_are():
    model = made()
    plain_mla(model)
    attention = model.decoder.layers[0].self_attention
    assert isinstance(attention.linear_proj, fake.RowParallelLinear)
    assert type(attention.linear_proj).__name__ == "PlainRowParallelLinear"
    assert type(attention.linear_proj) is type(model.decoder.layers[1].mlp.linear_fc2)
    out, bias = attention.linear_proj(torch.randn(2, 20))
    assert bias is attention.linear_proj.bias and out.shape == (2, 32)


def test_a_state_dict_goes_in_and_out():
    one, other = made(layers=1), made(layers=1)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    state = dict(other.state_dict())
    plain_mla(one)
    assert not any(one.load_state_dict(state))
    same(step(one), step(other))
    third = made(layers=1)
    third.load_state_dict(one.state_dict())
    same(step(third), step(other))


def test_the_configuration_of_others_is_left_alone_and_layers_are_one_row():
    model = made(bias_activation_fusion=True)
    config, mlp = model.config, model.decoder.layers[0].mlp
    table = plain_mla(model)
    assert config.bias_activation_fusion and model.decoder.config is config
    assert mlp.config is not config and not mlp.config.bias_activation_fusion
    row = next(row for row in table if row.fqn == "decoder.layers.0.mlp")
    assert row.done and row.now == "without bias_activation_fusion"
    text = str(plain_mla(made()))
    assert "decoder.layers.{0..1}.mlp.linear_fc2 ×2" in text and "decoder.layers.0." not in text


def test_undo_and_twice():
    model = made(te=True, bias_activation_fusion=True)
    before = {name: type(m) for name, m in model.named_modules()}
    config, table = model.decoder.layers[0].mlp.config, plain_mla(model)
    classes = {name: type(m) for name, m in model.named_modules()}
    assert classes != before and not plain_mla(model).done
    assert {name: type(m) for name, m in model.named_modules()} == classes
    for _ in range(2):
        table.undo()
    assert {name: type(m) for name, m in model.named_modules()} == before
    assert model.decoder.layers[0].mlp.config is config


def test_an_attention_alone_and_a_head_that_is_given_its_weight():
    attention, x = fake.MLASelfAttention(fake.Config(), te=True), torch.randn(5, 2, 32)
    want = attention(x, None)[0]
    assert "core_attention" in plain_mla(attention).done
    torch.testing.assert_close(attention(x, None)[0], want)
    # What torch's own attention does not serve is Transformer Engine's as before.
    assert attention.core_attention(*(torch.ones(5, 2, 2, 4),) * 3, None, fake.AttnMaskType.causal, None, 1).abs().max() == 0
    head = fake.ColumnParallelLinear(8, 6, config=fake.Config())
    weight, x = torch.randn(6, 8), torch.randn(2, 8)
    plain_mla(head)
    torch.testing.assert_close(head(x, weight=weight, runtime_gather_output=True)[0], x @ weight.T)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("returned", [False, True])
def test_linears_behind_norms(kind, zero, returned):
    made = fake.TELayerNormColumnParallelLinear(
        8, 6, config=fake.Config(), bias=True, skip_bias_add=returned, normalization=kind, zero=zero
    )
    x = torch.randn(3, 8)
    want = made(x)
    assert plain_mla(made).done == ("",)
    torch.testing.assert_close(made(x), want)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_embeddings(scatter, deterministic):
    made = fake.VocabParallelEmbedding(64, 6, scatter=scatter, deterministic=deterministic)
    want = made(ids())
    plain_mla(made)
    assert torch.equal(made(ids()), want)


@pytest.mark.parametrize("kind", [fake.RotaryEmbedding, fake.YarnRotaryEmbedding])
def test_rotary_tables(kind):
    made = kind(8, fake.Group())
    want = made(9), made(5, offset=3)
    table = plain_mla(made)
    assert table.done == ("",) and table.rows[0].now == "a table of angles"
    torch.testing.assert_close((made(9, packed_seq=False), made(5, offset=3)), want, rtol=0, atol=0)
    table.undo()
    assert type(made) is kind and not hasattr(made, "plain_rates")


def test_rotary_tables_and_groups_that_cannot_be_told_stay():
    left(fake.RotaryEmbedding(8, powers=2), "not the position times a rate")
    left(fake.RotaryEmbedding(8, fake.Group(2)), "context parallel over 2 ranks")
    broken = fake.RotaryEmbedding(8)
    del broken.inv_freq
    left(broken, "its table cannot be made here: AttributeError")
    config = fake.Config()
    left(fake.ColumnParallelLinear(8, 6, config=config, tp_group=fake.Group(2)), "has no name")
    rows = fake.VocabParallelEmbedding(8, 6)
    rows.tp_group = fake.Group(2)
    left(rows, "has no name")
    model = made(layers=1)
    model.pg_collection.tp = fake.Group(2)
    left(model, "has no name")


def left(module, words, name=""):
    before, table = type(module), plain_mla(module)
    assert words in table.left[name] and type(module) is before
    return table


class Dispatcher:
    """Megatron's, as far as it copies on a stream of its own, which is an error in a frame."""

    def __init__(self):
        self.traced = []

    def _maybe_dtoh_and_synchronize(self, point, tokens_per_expert=None):
        self.traced.append(torch.compiler.is_compiling())
        return tokens_per_expert


class Experts(nn.Module):
    def __init__(self, dispatcher):
        super().__init__()
        self.token_dispatcher = dispatcher

    def forward(self, x):
        return x * self.token_dispatcher._maybe_dtoh_and_synchronize("before_permutation_1", x.sum())


def test_copies_of_a_dispatcher_stay_out_of_compiled_code(monkeypatch, no_kernels):
    fake.install(monkeypatch, transformer__moe__token_dispatcher={"MoEAlltoAllTokenDispatcher": Dispatcher})
    x, layer = torch.randn(3, 4), Experts(Dispatcher())
    torch.compile(layer, backend="megacpp")(x)
    assert layer.token_dispatcher.traced == [True]  # so that the assertion below can fail
    torch._dynamo.reset()
    layer = Experts(Dispatcher())
    want, table = layer(x), plain_mla(layer)
    assert table.done == ("token_dispatcher",) and type(layer.token_dispatcher) is not Dispatcher
    assert not plain_mla(layer).rows, "once is enough"
    twin = copy.deepcopy(layer)
    assert torch.equal(torch.compile(twin, backend="megacpp")(x), want)
    assert twin.token_dispatcher.traced == [False, False] and layer.token_dispatcher.traced == [False]
    table.undo()
    assert type(layer.token_dispatcher) is Dispatcher

    class Own(Dispatcher):
        def _maybe_dtoh_and_synchronize(self, point, tokens_per_expert=None):
            return tokens_per_expert

    assert "of its own" in plain_mla(Experts(Own())).left["token_dispatcher"]


@pytest.mark.parametrize(("mode", "group", "overlap", "words"), [
    (None, None, False, "parallel_mode None over 4 ranks"), ("column", None, False, "not set yet"),
    ("row", fake.Group(4, "tp"), True, "tp_comm_overlap asks"),
])
def test_engine_linears_of_ranks_that_stay(mode, group, overlap, words):
    engine = fake.TELinear(8, 6, config=fake.Config(tp_comm_overlap=overlap))
    engine.tp_size, engine.parallel_mode, engine.tp_group = 4, mode, group
    left(engine, words)


@pytest.mark.parametrize(("kind", "field", "value", "words"), [
    (fake.ColumnParallelLinear, "gradient_accumulation_fusion", True, "main_grad"),
    (fake.ColumnParallelLinear, "embedding_activation_buffer", [], "deferred"),
    (fake.ColumnParallelLinear, "explicit_expert_comm", True, "its dispatcher"),
    (fake.ColumnParallelLinear, "config.cpu_offloading", True, "cpu_offloading"),
    (fake.TELinear, "fuse_wgrad_accumulation", True, "main_grad"),
    (fake.TELinear, "te_quant_params", object(), "te_quant_params"),
    (fake.TELinear, "return_layernorm_output", True, "return_layernorm_output"),
    (fake.TELinear, "config.fp8", "e4m3", "fp8 asks"),
])
def test_linears_that_do_more_stay(kind, field, value, words):
    made = kind(8, 6, config=fake.Config(defer_embedding_wgrad_compute=field == "embedding_activation_buffer"))
    owner, _, name = field.rpartition(".")
    setattr(made.config if owner else made, name, value)
    left(made, words)


def test_classes_of_others_stay():
    class Quantised(nn.Parameter):
        pass

    made = fake.TELinear(8, 6, config=fake.Config())
    made.weight = Quantised(torch.randn(6, 8))
    left(made, "a parameter is a Quantised")
    class Own(fake.ColumnParallelLinear):
        def forward(self, input_):
            return input_, None

    left(Own(8, 6, config=fake.Config()), "Own has a forward of its own")


@pytest.mark.parametrize(("place", "field", "value", "words"), [
    ("decoder.layers.0.self_attention", "recompute_up_proj", True, "mla_up_proj"),
    ("decoder.layers.0.self_attention", "checkpoint_core_attention", True, "core_attn"),
    ("decoder.layers.0", "recompute_mlp", True, "recompute_mlp"),
    ("decoder.layers.0.mlp", "config.use_te_activation_func", True, "use_te_activation_func"),
    ("decoder", "config.recompute_granularity", "full", "policy='full'"),
    ("decoder.layers.0.self_attention.core_attention", "config.window_size", (8, 0), "window_size"),
    ("decoder.layers.0.self_attention.core_attention", "config.context_parallel_size", 2, "over 2 ranks"),
])
def test_parts_that_run_otherwise_stay(place, field, value, words):
    model = made(te=True, layers=1)
    owner, _, name = field.rpartition(".")
    module = model.get_submodule(place)
    setattr(module.config if owner else module, name, value)
    before = type(module)
    assert words in plain_mla(model).left[place] and type(module) is before


class LanguageModelEmbedding(nn.Module):
    def __init__(self, config, scattered=True):
        super().__init__()
        self.config, self.scatter_to_sequence_parallel, self.reduce_scatter_embeddings = config, True, scattered


@pytest.mark.parametrize(("config", "scattered", "words"), [
    ({"sequence_parallel": True}, True, ""), ({}, False, ""),
    ({"sequence_parallel": True, "hidden_dropout": 0.1}, True, "sequence_parallel with hidden_dropout"),
    ({"sequence_parallel": True, "attention_dropout": 0.1}, True, "sequence_parallel with attention_dropout"),
    ({"sequence_parallel": True}, False, "scatters the sum"),
])
def test_random_states_that_nothing_draws_from(config, scattered, words, monkeypatch):
    home = {"LanguageModelEmbedding": LanguageModelEmbedding}
    fake.install(monkeypatch, models__common__embeddings__language_model_embedding=home)
    config = fake.Config(**config)
    block, rows = fake.TransformerBlock(config, 1), LanguageModelEmbedding(config, scattered)
    model = nn.ModuleDict({"block": block, "rows": rows})
    table = plain_mla(model)
    assert words in table.left.get("rows", "") and ("rows" in table.left) == bool(words)
    assert ("block" in table.left) == ("dropout" in words)
    quiet = [m for m in (block, rows) if m.config is not config]
    assert all(not m.config.sequence_parallel for m in quiet) and block.layers[0].config.sequence_parallel == config.sequence_parallel
    assert (rows in quiet) == (config.sequence_parallel and not words)
    table.undo()
    assert block.config is rows.config is config


def test_what_is_not_megatron_s_is_no_row(caplog):
    with caplog.at_level(logging.INFO, "megacpp_compile"):
        table = plain_mla(nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)))
    assert not table.rows and "0 of 0 modules" in str(table) and "0 of 0 modules" in caplog.text
    with pytest.raises(NotAModuleError):
        plain_mla(lambda x: x)


def make_viewless_tensor(inp, requires_grad, keep_graph):
    torch._dynamo.graph_break()
    return inp.clone()


def get_tensor_model_parallel_group_if_none(tp_group, is_expert=False, check_initialized=True):
    torch._dynamo.graph_break()
    return tp_group


class MTPLossAutoScaler(torch.autograd.Function):
    main_loss_backward_scale = torch.tensor(1.0)

    @staticmethod
    def forward(ctx, output, mtp_loss):
        ctx.save_for_backward(mtp_loss)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        (loss,) = ctx.saved_tensors
        return grad_output, torch.ones_like(loss) * MTPLossAutoScaler.main_loss_backward_scale


class Predicting(nn.Module):
    def forward(self, x):
        assert get_tensor_model_parallel_group_if_none(None) is None
        x = make_viewless_tensor(x, True, True) * 2
        return MTPLossAutoScaler.apply(x, x.square().mean(-1))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_multi_token_prediction_is_scaled_by_what_is_set_behind_forward(compiled, monkeypatch, no_kernels):
    utils = {f.__name__: f for f in (make_viewless_tensor, get_tensor_model_parallel_group_if_none)}
    groups, home = {"is_initialized": lambda: False}, {"MTPLossAutoScaler": MTPLossAutoScaler}
    fake.install(monkeypatch, utils=utils, parallel_state=groups, transformer__multi_token_prediction=home)
    model, own = Predicting(), vars(MTPLossAutoScaler)["backward"]
    x, grads, table = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(), [], None
    for plain in (False, True):
        if plain:
            table = plain_mla(model)
            assert vars(MTPLossAutoScaler)["backward"] is not own
        call = torch.compile(model, backend="megacpp") if plain and compiled else model
        for scale in (1.0, 3.0):  # as a schedule does, between forward and backward
            y = call(x)
            monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.tensor(scale))
            grads += torch.autograd.grad(y.sum(), [x])
    torch.testing.assert_close(grads[2:], grads[:2])
    assert not torch.equal(grads[0], grads[1])
    if compiled:
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    table.undo()
    assert vars(MTPLossAutoScaler)["backward"] is own


@pytest.mark.parametrize("change", [plain_mla, lambda model: replace_linears(model, "bf16")], ids=["plain_mla", "linears"])
@pytest.mark.parametrize("how", ["wrapped", "called", "in place", "by blocks"])
def test_compiled_models_are_refused(change, how, no_kernels, few_objects):
    given = model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    if how in ("wrapped", "called"):
        compiled = torch.compile(model, backend="megacpp")
        given = compiled if how == "wrapped" else model
        if how == "called":
            compiled(torch.randn(2, 4))
    elif how == "in place":
        model[2].compile(backend="megacpp")
    else:
        megacpp_compile.compile(model)
    before = copy.copy(dict(model.named_modules()))
    with pytest.raises(CompiledTooEarlyError, match="came after compilation"):
        change(given)
    assert dict(model.named_modules()) == before


def test_a_compilation_that_nobody_holds_is_over(no_kernels):
    model = nn.Sequential(nn.Linear(4, 4))
    compiled = torch.compile(model, backend="megacpp")
    compiled(torch.randn(2, 4))
    del compiled
    torch._dynamo.reset()
    plain_mla(model)
