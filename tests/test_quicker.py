"""What `tests/quicker.py` has in the place of torch's own does the same."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from enum import Enum
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._inductor import fx_utils
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor, meta_utils
from torch.fx import proxy
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _config_module, _pytree, _traceback

from tests import quicker


class Pair(NamedTuple):
    one: object
    other: object


def test_trees_are_as_torch_makes_them():
    trees = [
        1,
        None,
        (),
        [],
        {},
        (1, "a"),
        [1, (2, [3]), {}],
        {"b": 1, "a": (2, {})},
        Pair(1, [2, Pair(3, ())]),
        ((1, 2), {}),
    ]
    trees += [immutable_dict(x=immutable_list([1, 2])), OrderedDict(z=1, a=[2]), torch.Size((1, 2)), slice(1, (2, 3))]
    for tree in [*trees, trees]:
        assert list(_pytree.tree_iter(tree)) == list(_pytree.tree_iter.__wrapped__(tree))
        for quick, args in ((_pytree.tree_flatten, ()), (_pytree.tree_map, (lambda x: [x],))):
            got, want = quick(*args, tree), quick.__wrapped__(*args, tree)
            assert got == want and type(got) is type(want)
    leaves, spec = _pytree.tree_flatten(trees)
    assert _pytree.tree_unflatten(leaves, spec) == trees
    assert _pytree.tree_flatten([[1], 2], is_leaf=lambda x: x == [1])[0] == [[1], 2]
    assert _pytree.tree_map(lambda x, y: x + y, (1, [2]), (3, [4])) == (4, [6])


def test_what_two_symbolic_numbers_give_is_what_torch_says():
    """Met again, too, and once a symbol has turned out to be a number."""
    env, dims = ShapeEnv(), StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
    mode = fake_tensor.FakeTensorMode(shape_env=env)
    sizes = mode.from_tensor(torch.ones(5, 7), source=ConstantSource("real"), symbolic_context=dims).shape
    n, m, unbacked = (size.node for size in (*sizes, env.create_unbacked_symint()))
    one, two, five = map(n.wrap_int, (1, 2, 5))
    told = ("_expr", "pytype", "_hint", "constant", "_optimized_summation", "shape_env")
    for _ in range(2):
        numbers = [n, m, unbacked, n.add(m), n.mul(two), m.int_floordiv(two), unbacked.add(one), one, five]
        truths = [n.lt(m), n.eq(m), unbacked.ge(five)]
        for name in [name for name in quicker._OPERATIONS if hasattr(SymNode, name)]:
            quick = getattr(SymNode, name)
            for pair in itertools.product(truths if name in ("_and", "_or", "_sym_and", "_sym_or") else numbers, repeat=2):
                for _ in range(2):
                    got, want = quick(*pair), quick.__wrapped__(*pair)
                    assert [getattr(got, part) for part in told] == [getattr(want, part) for part in told], name
                    assert type(got._hint) is type(want._hint), name
        assert sizes[0] == 5  # which is noted
    assert n.expr == 5


def test_what_is_known_of_fake_tensors_is_what_torch_says(monkeypatch):
    real = torch.ones(5, 3)
    with fake_tensor.FakeTensorMode(shape_env=ShapeEnv()) as mode:
        made = torch.randn(4, 6, requires_grad=True)
        tensors = [
            made,
            made.detach()[1:, ::2],
            made.mT,
            torch.ones(()),
            torch.ones(0, 3),
            torch.ones(2, dtype=torch.bfloat16),
        ]
        image = torch.ones(2, 3, 4, 5)
        tensors += [image, image.to(memory_format=torch.channels_last), torch.ones(2, dtype=torch.complex64).conj()]
        tensors += [made.to_sparse(), made.expand(3, 4, 6), torch.ones(1, 1).expand(2, 2)]
        dims = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
        symbolic = mode.from_tensor(real, source=ConstantSource("real"), symbolic_context=dims)
        assert symbolic._has_symbolic_sizes_strides
        for t in (*tensors, symbolic):
            quick = proxy_tensor._extract_tensor_metadata
            assert quick(t) == quick.__wrapped__(t)
        calls = [(t,) for t in (*tensors[:9], *tensors[10:], made + 1, image.clone(), made.mT.detach(), made.detach().mT)]
        calls += [(made, x) for x in (1, 1.0, True, None, "1", (1,), [1], (), [(1, 2)], [(1,), 2], {"a": 1}, torch.float32)]
        spread, keys = fake_tensor.FakeTensorMode._prep_args_for_hash, []
        for how in (spread, spread.__wrapped__):
            monkeypatch.setattr(fake_tensor.FakeTensorMode, "_prep_args_for_hash", how)
            keys.append([mode._cache_key(fake_tensor._CacheKeyState(None), torch.ops.aten.sin.default, c, {}) for c in calls])
            for t in (symbolic, symbolic[0], symbolic[-1]):  # a row has sizes that are numbers, and its memory has not
                with pytest.raises(fake_tensor._BypassDispatchCache):
                    mode._cache_key(fake_tensor._CacheKeyState(None), torch.ops.aten.sin.default, (t,), {})
        quick, theirs = ([[a == b for b in made] for a in made] for made in keys)
        assert quick == theirs and sum(map(sum, quick)) > len(calls)
        monkeypatch.undo()
        for _ in range(2):  # the second time from the cache
            results = [
                (made.detach() * 2, 4, 6),
                (made.detach()[1:, ::2], 3, 3),
                (made * 1.5, 4, 6),
                (made.mT.detach(), 6, 4),
            ]
            assert [tuple(t.shape) for t, *_ in results] == [tuple(shape) for _, *shape in results]
            assert [t.is_contiguous() for t, *_ in results] == [True, False, True, False]
            assert [t.untyped_storage()._cdata == made.untyped_storage()._cdata for t, *_ in results] == [
                False,
                True,
                False,
                True,
            ]
            assert results[1][0].storage_offset() == 6 and [t.requires_grad for t, *_ in results] == [
                False,
                False,
                True,
                False,
            ]


def test_stacks_are_those_that_torch_gathers():
    def forward():
        return proxy.CapturedTraceback.extract().summary(), _traceback.CapturedTraceback.extract().summary()

    assert proxy.CapturedTraceback is not _traceback.CapturedTraceback
    for _ in range(2):  # anew, and remembered
        quick, whole = forward()
        assert [(f.filename, f.name, f.line) for f in quick] == [(f.filename, f.name, f.line) for f in whole]
        assert [f.lineno for f in quick] == [f.lineno for f in whole] and type(quick) is type(whole)
        assert [f.name for f in quick][-2:] == ["test_stacks_are_those_that_torch_gathers", "forward"]


def test_settings_are_what_they_are(monkeypatch):
    """Of each of torch's modules of settings; those that are set, too, and none that is not there."""
    quick = _config_module.ConfigModule.__getattr__
    if (whole := getattr(quick, "__wrapped__", None)) is None:
        pytest.skip("this torch's settings are asked for otherwise, and left as they are")
    for module in (torch._dynamo.config, torch._inductor.config, torch._functorch.config):
        for name, entry in module._config.items():
            if not (entry.deprecated or entry.hide):
                assert quick(module, name) is whole(module, name), name
        with pytest.raises(AttributeError, match="nothing_of_this_name"):
            module.nothing_of_this_name  # noqa: B018
    with torch._dynamo.config.patch(recompile_limit=3):
        assert torch._dynamo.config.recompile_limit == torch._dynamo.config.cache_size_limit == 3
    hidden = torch._dynamo.config._config["verbose"]
    monkeypatch.setattr(hidden, "hide", True)
    assert not hasattr(torch._dynamo.config, "verbose")


def test_what_is_opaque_is_so():
    resolve = pytest.importorskip("torch._library.opaque_object")._resolve_opaque_type_info
    base = pytest.importorskip("torch._opaque_base").OpaqueBase

    class Kind(Enum):
        ONE = 1

    assert resolve(Kind).opaque_typ == "value" and resolve(int) is resolve(torch.Tensor) is resolve([]) is None
    assert isinstance(Kind.ONE, base) and not any(isinstance(x, base) for x in (1, "1", torch.ones(1), None, []))


def test_layouts_are_told_apart():
    square = torch.eye(4)
    sparse = [square.to_sparse(), square.to_sparse_csr(), square.to_sparse_csc(), square.to_sparse_bsr((2, 2))]
    for quick in (meta_utils.is_sparse_any, fake_tensor.is_sparse_any, proxy_tensor.is_sparse_any):
        assert all(map(quick, sparse)) and not any(map(quick, (square, 1, None, torch.strided)))
    with fake_tensor.FakeTensorMode() as mode:
        assert meta_utils.is_sparse_any(mode.from_tensor(sparse[0])) and not meta_utils.is_sparse_any(torch.ones(2))


def test_a_kernel_is_entered_and_left_as_torch_does():
    """Once in another, too, and where it fails."""
    mode, inside = fake_tensor.FakeTensorMode(), fake_tensor.in_kernel_invocation_manager
    state = lambda: (mode.in_kernel_invocation, torch._C._meta_in_tls_dispatch_include())  # noqa: E731
    assert isinstance(inside, type) and state() == (False, False)
    with mode, inside(mode):
        assert state() == (True, True)
        with inside(mode):
            assert torch.ones(2, device="meta").device.type == "meta"
        assert state() == (True, True)
    assert state() == (False, False)
    with pytest.raises(ZeroDivisionError), inside(mode):
        1 / 0  # noqa: B018
    assert state() == (False, False)
    mode.in_kernel_invocation = True
    with pytest.raises(AssertionError), inside(mode):
        pass


@pytest.mark.parametrize("how", ["as torch", "quick"])
def test_what_a_pass_has_changed_is_known_again(how):
    """New nodes, nodes that read others now, and whoever reads these; the rest keeps its very values."""
    quick = fx_utils.FakeTensorUpdater.incremental_update
    update = quick if how == "quick" else quick.__wrapped__
    mode = fake_tensor.FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        inputs = torch.ones(4, 6), torch.ones(3, 6)
    gm = proxy_tensor.make_fx(lambda x, y: (x.relu().exp().t(), y.sin()))(*inputs)
    with V.set_fake_mode(mode):
        updater = fx_utils.FakeTensorUpdater(gm)
        (x, y), (relu,) = gm.graph.find_nodes(op="placeholder"), (n for n in gm.graph.nodes if "relu" in n.name)
        (exp,), (t,), (sin,) = relu.users, next(iter(relu.users)).users, y.users
        kept = {n: n.meta["val"] for n in (x, y, relu, sin)}
        with gm.graph.inserting_before(exp):
            cut = gm.graph.call_function(torch.ops.aten.slice.Tensor, (relu, 0, 0, 2))
        exp.replace_input_with(relu, cut)
        assert update(updater) == 3
        assert [tuple(n.meta["val"].shape) for n in (cut, exp, t)] == [(2, 6), (2, 6), (6, 2)]
        assert all(n.meta["val"] is value for n, value in kept.items())
        assert update(updater) == 0
