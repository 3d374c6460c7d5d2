"""`apply_checkpoints`: which blocks of an eager model backward recomputes, and that it computes the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import megacpp_compile
from megacpp_compile import CheckpointingPolicy, apply_checkpoints, errors
from megacpp_compile.precision import engine
from tests.precision import fake_te
from tests.precision.test_kept_choices import DIM, TOKENS, Routed, Wobble


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (t[None, None] for t in self.q(x).chunk(3, -1))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v)[0, 0])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixer, self.experts = nn.RMSNorm(DIM), Mixer(), Routed()

    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        return x + self.experts(self.norm(x))


class Model(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(layers)), nn.Linear(DIM, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


ALL = {"last_layer": "full_plus_norms"}


def made():
    return Model().double(), torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)


def step(model, x, ties=(3,)):
    """Gradients by name, and the bytes that autograd keeps."""
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    named = {"x": x, **{n.replace("_checkpoint_wrapped_module.", ""): p for n, p in model.named_parameters()}}
    with Wobble(ties, "topk"):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(x).square().sum()
        found = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return dict(zip(named, found, strict=True)), sum(kept.values())


KINDS = ("ablock", "mblock", "eblock", "rblock")


@pytest.mark.parametrize("policy", ["full_plus_norms", "full", "selective"])
@pytest.mark.parametrize("last", ["never", "all"])
def test_gradients_are_those_without(policy, last):
    """With a token near a tie in each layer, whose scores are never the same twice."""
    model, x = made()
    plain = copy.deepcopy(model)
    table = apply_checkpoints(model, {**dict.fromkeys(KINDS, policy),
                                      "last_layer": policy if last == "all" else "never"})  # fmt: skip
    want, whole = step(plain, x)
    got, _ = step(model, x)
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name
    recomputed = {"full_plus_norms": ("",)}.get(policy, (".mixer", ".experts"))
    layers = range(3 if last == "all" else 2)
    assert table.recomputed == tuple(f"layers.{i}{part}" for i in layers for part in recomputed)
    if policy != "selective":  # there choices are torch's own to keep
        assert table.relaxed == tuple(n for n in table.recomputed if not n.endswith(".mixer"))
        assert "choices kept, shapes not compared" in str(table)


def test_less_is_saved_and_names_in_the_state_dict_stay():
    model, x = made()
    saved = {}
    for policy in ("none", "full", "full_plus_norms"):
        twin = copy.deepcopy(model)
        apply_checkpoints(twin, CheckpointingPolicy.of(policy))
        _, saved[policy] = step(twin, x, ())
    assert saved["none"] > saved["full"] > saved["full_plus_norms"]
    model, _ = made()
    plain = copy.deepcopy(model)
    apply_checkpoints(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())


def test_kinds_have_entries_of_their_own():
    model, x = made()
    plain = copy.deepcopy(model)
    policy = {"ablock": "selective", "eblock": "full", "mblock": "none", "rblock": "none", "last_layer": "full"}
    with pytest.raises(errors.BadOptionError, match=r"block_kinds.*a kind for 'layers.0.mixer'"):
        apply_checkpoints(model, policy)
    kinds = {"*.mixer": "ablock", "*.experts": "eblock"}
    table = apply_checkpoints(model, policy, block_kinds=kinds)
    found = [(r.fqn, r.kind, r.entry) for r in table]
    assert found[:2] == [("layers.0.mixer", "ablock", "selective"), ("layers.0.experts", "eblock", "full")]
    assert found[-2:] == [("layers.2.mixer", "ablock", "full"), ("layers.2.experts", "eblock", "full")]
    want, got = step(plain, x)[0], step(model, x)[0]
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_flips_and_words_of_the_user():
    model, x = made()
    table = apply_checkpoints(
        model, {**dict.fromkeys(KINDS, "full"), "last_layer": "full"},
        routes={"*.experts": True, "*.mixer": False}, count_flips=True,
    )  # fmt: skip
    assert table.relaxed == tuple(f"layers.{i}.experts" for i in range(3)), "known before any call"
    step(model, x, (3, 4))
    assert table.flips == 2 * 3 and "flips" in str(table) and "not watched" in str(table)


def test_a_layer_in_the_list_twice():
    class Twice(Model):
        def __init__(self):
            super().__init__(2)
            self.layers.append(self.layers[0])

    model, x = Twice().double(), made()[1]
    plain = copy.deepcopy(model)
    assert len(apply_checkpoints(model, {**ALL, **dict.fromkeys(KINDS, "full_plus_norms")}).rows) == 2
    assert model.layers[0] is model.layers[2]
    want, got = step(plain, x, ())[0], step(model, x, ())[0]
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(("policy", "match"), [
    ({"budget": 0.5}, r"policy.budget.*needs a graph"), ({"peak_gib": 4}, "policy.peak_gib"),
    ({"offload": "all"}, "policy.offload"), ({"eblock": "expert_gemm_only"}, "policy.eblock"),
    ({"ablock": 0.5}, "policy.ablock"), ({"recompute": "mlp"}, "policy.recompute.*needs a graph"), (None, "policy"),
    ("fulll", "Did you mean 'full'"),
])
def test_what_eager_cannot_carry_out(policy, match):
    model, _ = made()
    with pytest.raises(errors.BadOptionError, match=match):
        apply_checkpoints(model, policy)
    assert type(model.layers[0]) is Layer


def test_what_cannot_be_wrapped():
    model, twice, own, compiled = (made()[0] for _ in range(4))
    apply_checkpoints(twice)
    own.layers[1].gradient_checkpointing = True
    compiled.layers[0].compile()
    for given, options, error, words in (
        (model.forward, {}, errors.NotAModuleError, ""),
        (model, {"blocks": "layer.*"}, errors.BlockNotFoundError, "layer.*"),
        (model, {"routes": {"*.experrts": True}}, errors.BlockNotFoundError, r"\*.experrts"),
        (nn.Linear(2, 2), {}, errors.BlockNotFoundError, "a repeated block"),
        (twice, {}, errors.CheckpointedTwiceError, "layers.0 is checkpointed already, by CheckpointWrapper"),
        (own, {}, errors.CheckpointedTwiceError, "layers.1"), (compiled, {}, errors.AlreadyCompiledError, ""),
    ):
        with pytest.raises(error, match=words):
            apply_checkpoints(given, **options)


def test_compiled_afterwards_it_chooses_once_too(no_kernels):
    """A region of the graph then, in which the compiler keeps the choice."""
    _, x = made()
    model = nn.Sequential(*(Mixer().double() for _ in range(2)))
    plain = copy.deepcopy(model)
    apply_checkpoints(model, {**ALL, **dict.fromkeys(KINDS, "full_plus_norms")})
    with megacpp_compile.record() as report:
        got = torch.compile(model, backend="megacpp", fullgraph=True)(x)
    assert report.frames[0].captured
    got.square().sum().backward()
    mine, x.grad = x.grad, None
    plain(x).square().sum().backward()
    torch.testing.assert_close(mine, x.grad)


@pytest.mark.parametrize("policy", ["full_plus_norms", "full", "selective"])
def test_models_nobody_here_wrote(policy):
    """Layers take keywords and masks; experts are sorted and multiplied in groups."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=64,
    )  # fmt: skip
    model, ids = transformers.MixtralForCausalLM(config), torch.randint(64, (2, 12))
    plain = copy.deepcopy(model)
    table = apply_checkpoints(model, {**dict.fromkeys(KINDS, policy), "last_layer": policy})
    found = []
    for one in (plain, model):
        one(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append([p.grad for p in one.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    if policy != "selective":
        assert len(table.relaxed) == 3 and all("self_attn" not in name for name in table.relaxed)


class TeLayer(nn.Module):
    def __init__(self, te):
        super().__init__()
        self.up, self.down = te.Linear(32, 64, device="cpu"), te.Linear(64, 32, device="cpu")

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def test_blocks_in_fp8_go_through_transformer_engine(te):
    model = nn.Sequential(*(TeLayer(te) for _ in range(3)))
    plain, x = copy.deepcopy(model), torch.randn(16, 32, requires_grad=True)
    table = apply_checkpoints(model)
    assert table.guarded == 6 and "te_checkpoint" not in str(table)
    fake_te.STATE.rounds = True
    for size in (1.0, 3.0):
        grads = []
        for one in (plain, model):
            one.zero_grad()
            with te.autocast(enabled=True, recipe=engine.recipe_object("fp8_delayed")):
                loss = one(size * x).square().sum()
            loss.backward()
            grads.append([p.grad for p in one.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    histories = [[m.fp8_meta["history"] for m in one.modules() if hasattr(m, "fp8_meta")] for one in (plain, model)]
    assert histories[0] == histories[1] and all(len(h) == 2 for h in histories[0])
    ran_again = [second for _, _, second in fake_te.STATE.ran]
    assert sum(ran_again) == 2 * 2 * 2, "two layers of two modules in two steps; the last layer is kept"


def test_by_hand_they_are_refused(te):
    """Once checkpoints are applied to a model, torch's own inside of a layer that is kept is an error in fp8."""
    model = nn.Sequential(*(TeLayer(te) for _ in range(2)))
    apply_checkpoints(model)
    with te.autocast(enabled=True, recipe=engine.recipe_object("fp8_current")):
        with pytest.raises(errors.StockCheckpointError, match="apply_checkpoints"):
            checkpoint(model[1], torch.randn(16, 32, requires_grad=True), use_reentrant=False)
    none = nn.Sequential(*(TeLayer(te) for _ in range(2)))
    apply_checkpoints(none, {**dict.fromkeys(KINDS, "full_plus_norms"), "fp8_wrapper": "none"})
    with te.autocast(enabled=True, recipe=engine.recipe_object("fp8_current")):
        with pytest.raises(errors.StockCheckpointError, match="up in TeLayer"):
            none(torch.randn(16, 32, requires_grad=True))
