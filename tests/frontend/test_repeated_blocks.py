"""Which blocks of Dynamo's graph are found to be equal, and why a graph is left whole."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megacpp_compile.frontend.calls_of_blocks import NotCut
from megacpp_compile.frontend.repeated_blocks import cut
from tests.memory.layered import MLP, Experts


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, number=0, dim=8, scale=1.0):
        super().__init__()
        self.number, self.scale = number, scale
        self.first, self.second, self.mlp, self.wide = Norm(dim), Norm(dim), MLP(dim), MLP(dim, 24)

    def mixed(self, x, table):
        return torch.tanh(self.mlp(self.first(x)) * table) * self.scale

    def forward(self, x, table):
        x = x + self.mixed(x, table)
        x = x + torch.sigmoid(self.wide(self.second(x)))
        return x - torch.sin(self.wide(self.second(x)))


class Stack(nn.Module):
    def __init__(self, layers, dim=8):
        super().__init__()
        self.layers, self.embed, self.norm = nn.ModuleList(layers), nn.Embedding(11, dim), Norm(dim)

    def between(self, layer, x, table):
        return layer(x, table)

    def forward(self, ids):
        x = self.embed(ids)
        table = torch.arange(x.shape[-1], device=x.device).cos()
        for layer in self.layers:
            x = self.between(layer, x, table)
        return self.norm(x).square().sum(-1)


class Checkpointed(Stack):
    def between(self, layer, x, table):
        return checkpoint(layer, x, table, use_reentrant=False)


def ids():
    return torch.arange(10).view(2, 5)


def pieces(model, *args, rules=lambda *_: None, **settings):
    """The pieces of `model`, compiled with `settings`; or why it is left whole."""
    found = []

    def backend(gm, inputs):
        try:
            found.append(cut(gm, inputs, rules))
        except NotCut as why:
            found.append(str(why))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, **settings)(*(args or (ids(),)))
    return found[-1]


def kinds(found):
    """The names of equal blocks, kind by kind."""
    assert not isinstance(found, str), found
    named = {}
    for piece in found:
        if piece.name:
            named.setdefault(piece.kind, []).append(piece.name.rpartition(".")[2])
    return ["".join(names) for names in named.values()]


def stack(*changes, count=5, of=Stack, **options):
    """A stack of `count` layers, of which `changes` change one each: by its place."""
    layers = [Layer(i, **options) for i in range(count)]
    model = of(layers)
    for place, change in changes:
        change(layers[place])
    return model


def test_equal_layers_and_what_lies_between():
    found = pieces(stack())
    assert kinds(found) == ["01234"]
    assert [piece.name for piece in found] == ["", *(f"layers.{i}" for i in range(5)), ""]
    assert found[1].module == "Layer"
    assert sum(len(piece.calls) for piece in found) == len({n for piece in found for n in piece.calls})


def numbered(layer):
    layer.scale = 0.5


def frozen(layer):
    layer.mlp.up.weight.requires_grad_(False)


def in_float64(layer):
    layer.mlp.double()
    layer.mlp.up.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    layer.mlp.register_forward_hook(lambda _, args, out: out.float())


def wider(layer):
    layer.mlp = MLP(8, 32)


def transposed(layer):
    layer.mlp.up.weight = nn.Parameter(torch.randn(8, 16).t())


def tied_within(layer):
    layer.second = layer.first


def other_constant_dtype(layer):
    layer.scale = 1


def gives_more(layer):
    forward = layer.mlp.forward

    def call(x):
        layer.seen = forward(x)
        return layer.seen

    layer.mlp.forward = call


def without_parameter(layer):
    weight = layer.first.weight.detach().clone()
    del layer.first.weight
    layer.first.register_buffer("weight", weight.requires_grad_())


DIFFERENCES = [numbered, frozen, in_float64, wider, transposed, tied_within, other_constant_dtype, without_parameter]


@pytest.mark.parametrize("change", DIFFERENCES, ids=lambda change: change.__name__)
def test_a_layer_that_differs_is_no_equal(change):
    found = pieces(stack((2, change)))
    assert kinds(found) == ["0134"]
    assert [piece.name for piece in found][3] == ""


def test_each_difference_twice_is_a_kind():
    assert kinds(pieces(stack((1, numbered), (3, numbered)))) == ["024", "13"]


def test_dense_layers_before_experts():
    def experts(layer):
        layer.mlp = Experts(8)

    assert kinds(pieces(stack(*((i, experts) for i in (2, 3, 4))))) == ["01", "234"]


class Twins(nn.Module):
    """Two equal stacks of equal layers, one behind the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (Half([Layer(i) for i in range(3)]) for _ in range(2))

    def forward(self, x, table):
        return self.second(self.first(x, table), table)


class Half(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, table):
        for layer in self.layers:
            x = layer(x, table)
        return x


def test_of_blocks_within_blocks_those_that_leave_least():
    x = torch.ones(2, 8, requires_grad=True)
    found = pieces(Twins(), x, torch.ones(8))
    assert [p.name for p in found] == [f"{half}.layers.{i}" for half in ("first", "second") for i in range(3)]


def test_what_two_kinds_of_blocks_have_in_common_is_part_of_them():
    def experts(layer):
        layer.wide = Experts(8)

    assert kinds(pieces(stack(*((i, experts) for i in range(3, 7)), count=7))) == ["012", "3456"]


def test_the_first_layer_reads_no_gradient():
    model = stack()
    model.embed.weight.requires_grad_(False)
    assert kinds(pieces(model)) == ["1234"]


def test_names_classes_and_numbers_that_nothing_is_computed_with_do_not_count():
    class Renamed(Layer):
        pass

    layers = [Layer(i) if i % 2 else Renamed(i) for i in range(4)]
    assert kinds(pieces(Stack(layers))) == ["0123"]


def test_one_layer_called_again():
    layer = Layer()
    assert kinds(pieces(Stack([layer, layer, Layer(), layer]))) == ["0123"]


def test_what_a_rule_over_names_tells_apart():
    def rules(name, names):
        return "layers.3.mlp.up" in names

    assert kinds(pieces(stack(), rules=rules)) == ["0124"]


def test_checkpoint_regions():
    assert kinds(pieces(stack(of=Checkpointed))) == ["01234"]
    assert kinds(pieces(stack((2, numbered), of=Checkpointed))) == ["0134"]


def test_checkpoint_regions_of_different_policies():
    def save_products(ctx, op, *args, **kwargs):
        return op == torch.ops.aten.mm.default

    def save_nothing(ctx, op, *args, **kwargs):
        return False

    class Selective(Stack):
        def between(self, layer, x, table):
            chosen = save_nothing if layer.number == 2 else save_products
            contexts = functools.partial(create_selective_checkpoint_contexts, chosen)
            return checkpoint(layer, x, table, use_reentrant=False, context_fn=contexts)

    assert kinds(pieces(stack(of=Selective))) == ["0134"]


def test_sizes_that_are_inputs():
    tokens = ids()
    torch._dynamo.mark_dynamic(tokens, 1)
    found = pieces(stack(), tokens)
    assert kinds(found) == ["01234"]
    assert all(any(isinstance(n.meta["example_value"], torch.SymInt) for n in p.inputs) for p in found if p.name)


@pytest.mark.parametrize("layers", [1, 3])
def test_few_blocks_are_left_whole(layers):
    assert pieces(stack(count=layers)) in ("no block repeats", "3 blocks, fewer than 4")


def test_small_blocks_are_left_whole():
    assert pieces(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), torch.ones(2, 4)) == "no block repeats"


class Counting(Layer):
    def __init__(self, number):
        super().__init__(number)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, table):
        self.calls.add_(1)
        return super().forward(x, table)


class Shifting(Layer):
    """Writes to what the layer before has made."""

    def forward(self, x, table):
        x.mul_(1.5)
        return super().forward(x, table)


@pytest.mark.parametrize("layer", [Counting, Shifting])
def test_writes_to_what_is_made_elsewhere(layer):
    assert "writes to what is made elsewhere" in pieces(Stack([layer(i) for i in range(5)]))


def test_writes_within_a_block():
    class Within(Layer):
        def mixed(self, x, table):
            return super().mixed(x, table).mul_(2.0)

    assert kinds(pieces(Stack([Within(i) for i in range(5)]))) == ["01234"]


class Rounded(Stack):
    """Runs all layers under one autocast."""

    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16):
            out = super().forward(ids)
        return out


def test_modes():
    class Closed(Layer):
        def forward(self, x, table):
            with torch.autocast("cpu", torch.bfloat16):
                mixed = self.mlp(self.first(x))
            with torch.no_grad():
                fixed = torch.tanh(self.wide(self.second(x)))
            return x + torch.sigmoid(mixed * table).float() * fixed

    assert kinds(pieces(Stack([Closed(i) for i in range(5)]))) == ["01234"]
    assert "mode goes on" in pieces(stack(of=Rounded))


def test_sizes_known_at_run_time_only():
    class Hits(Layer):
        def mixed(self, x, table):
            rows = torch.where(x[0, :, 0] > 0)[0]
            return x.index_add(1, rows, x[:, rows])

    model = Stack([Hits(i) for i in range(5)])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert isinstance(found := pieces(model), str) or kinds(found)


def test_the_graph_is_left_as_it_was():
    texts = []

    def backend(gm, inputs):
        texts.append(str(gm.graph))
        found = cut(gm, inputs)
        found[1].graph_of(gm)
        texts.append(str(gm.graph))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(stack(), backend=backend)(ids())
    assert texts[0] == texts[1]
