"""What torch does over and over with fake tensors while it compiles, done once: the rest of `tests/quicker.py`."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import _ops
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import fx_utils
from torch._inductor.virtualized import V
from torch._subclasses import fake_impls, fake_tensor, meta_utils
from torch.fx.experimental import proxy_tensor
from torch.fx.passes import shape_prop

from tests.quicker import as_of


def with_quick_keys(patch: pytest.MonkeyPatch) -> None:
    """A thirtieth goes into keys of fake tensors' results: what is known of each operand is made an object, and taken apart
    by the names of its fields, after it was asked for its kind ten times."""
    if not hasattr(fake_tensor.FakeTensorMode, "_prep_args_for_hash"):
        return
    whole = fake_tensor.FakeTensorMode._prep_args_for_hash
    plain = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

    @functools.wraps(whole)
    def spread(self: Any, result: list[Any], args: Any, state: Any, id_hashed_objects: list[Any]) -> None:
        result.append((type(args), len(args)))
        for arg in (*args, *args.values()) if isinstance(args, dict) else args:
            kind = type(arg)
            if kind in plain:
                result += (kind, arg)
            elif kind is tuple or kind is list or kind is dict:
                spread(self, result, arg, state, id_hashed_objects)
            elif kind is fake_tensor.FakeTensor and arg.fake_mode is self and _is_plain(arg):
                result.append((
                    arg.dtype, arg.shape, arg.stride(), arg.device, arg.storage_offset(), arg.untyped_storage().nbytes(),
                    arg.requires_grad, arg.is_quantized, arg.is_conj(), arg.is_neg(), arg.is_inference(),
                ))  # fmt: skip
            else:
                whole(self, result, (arg,), state, id_hashed_objects)

    as_of(fake_tensor, spread)
    if list(inspect.signature(whole).parameters) == ["self", "result", "args", "state", "id_hashed_objects"]:
        patch.setattr(fake_tensor.FakeTensorMode, "_prep_args_for_hash", spread)


def _is_plain(t: Any) -> bool:
    """Whether all sizes are numbers, that of the memory too, of which `t` may be one row."""
    if t.layout is not torch.strided or t.constant is not None or t._has_symbolic_sizes_strides:
        return False
    return type(t.storage_offset()) is type(t.untyped_storage().nbytes()) is int


class _InKernel:
    """torch's `in_kernel_invocation_manager`, which is a generator."""

    __slots__ = ("guards", "mode", "prior")

    def __init__(self, fake_mode: Any) -> None:
        self.mode = fake_mode

    def __enter__(self) -> None:
        self.prior = self.mode.in_kernel_invocation
        if torch._C._meta_in_tls_dispatch_include() != self.prior:
            raise AssertionError("a kernel is invoked in one of the two, thread and mode, alone")
        self.guards = torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard()
        self.guards[0].__enter__()
        self.mode.in_kernel_invocation = True
        self.guards[1].__enter__()
        torch._C._set_meta_in_tls_dispatch_include(True)

    def __exit__(self, *error: Any) -> None:
        self.mode.in_kernel_invocation = self.prior
        for guard in reversed(self.guards):
            guard.__exit__(*error)


def with_quick_questions(patch: pytest.MonkeyPatch) -> None:
    """A hundredth each goes into entering kernels by way of a generator, and into asking a tensor for five layouts."""
    arguments = list(inspect.signature(fake_tensor.in_kernel_invocation_manager).parameters)
    guards = ("_DisableTorchDispatch", "_PreserveDispatchKeyGuard", "_meta_in_tls_dispatch_include")
    if arguments == ["fake_mode"] and all(hasattr(torch._C, name) for name in guards):
        as_of(fake_tensor, _InKernel.__init__, _InKernel.__enter__, _InKernel.__exit__)
        for module in (fake_tensor, fake_impls):
            if hasattr(module, "in_kernel_invocation_manager"):
                patch.setattr(module, "in_kernel_invocation_manager", _InKernel)

    def is_sparse_any(t: Any) -> bool:  # where it is imported, too: its names are those of torch's module
        return isinstance(t, torch.Tensor) and t.layout is not torch.strided and (is_sparse_coo(t) or is_sparse_compressed(t))  # type: ignore[name-defined] # noqa: F821

    if hasattr(meta_utils, "is_sparse_compressed") and hasattr(meta_utils, "is_sparse_any"):
        as_of(meta_utils, is_sparse_any)
        patch.setattr(meta_utils.is_sparse_any, "__code__", is_sparse_any.__code__)


def with_quick_fakes(patch: pytest.MonkeyPatch) -> None:
    """A thirtieth goes into making a fake tensor of what is known of one, in contexts that numbers for sizes have no need
    of, and into asking for what formats it could be contiguous before the usual one is found to be its own."""
    if not hasattr(fake_tensor.FakeTensorMode, "_get_output_tensor_from_cache_entry"):
        return
    make = fake_tensor.FakeTensorMode._get_output_tensor_from_cache_entry
    describe = proxy_tensor._extract_tensor_metadata

    @functools.wraps(make)
    def made(self: Any, state: Any, entry: Any, key: Any, func: Any, args: Any) -> Any:
        told = entry.metadata
        if entry.inplace_idx is not None or told is None or told.layout is not torch.strided:
            return make(self, state, entry, key, func, args)
        if told.is_conj or told.is_neg or any(type(size) is not int for size in (*told.shape, *told.stride, told.storage_offset)):
            return make(self, state, entry, key, func, args)
        sizes, inside = (tuple(told.shape), tuple(told.stride)), fake_tensor.in_kernel_invocation_manager
        with inside(self):
            empty = torch.empty_strided(*sizes, dtype=told.dtype, device="meta", requires_grad=told.requires_grad)
        if isinstance(func, _ops.OpOverload) and func.is_view:
            storage = args[entry.view_idx].untyped_storage()
            with inside(self):
                empty.set_(storage, told.storage_offset, *sizes)
        return fake_tensor.FakeTensor(self, empty, told.device)

    @functools.wraps(describe)
    def described(t: torch.Tensor, include_contiguity: bool = True) -> Any:
        usual = include_contiguity and t.layout is torch.strided and not t._has_symbolic_sizes_strides
        if not usual or t.is_quantized or not t.is_contiguous():
            return describe(t, include_contiguity)
        return shape_prop.TensorMetadata(
            t.shape, t.dtype, t.requires_grad, t.stride(), torch.contiguous_format, False, {}
        )

    as_of(fake_tensor, made)
    as_of(shape_prop, described)
    if list(inspect.signature(make).parameters) == ["self", "state", "entry", "key", "func", "args"]:
        patch.setattr(fake_tensor.FakeTensorMode, "_get_output_tensor_from_cache_entry", made)
    if shape_prop.TensorMetadata._fields == (
        "shape", "dtype", "requires_grad", "stride", "memory_format", "is_quantized", "qparams"
    ):  # fmt: skip
        patch.setattr(proxy_tensor, "_extract_tensor_metadata", described)


def with_quick_memories(patch: pytest.MonkeyPatch) -> None:
    """Of each fake tensor five numbers are noted as not known yet, each by three names that are put together for it."""
    if not hasattr(fake_tensor, "SymNumberMemoDescriptor"):
        return
    remember = fake_tensor.SymNumberMemoDescriptor.__set__
    unknown = functools.cache(lambda name: dict.fromkeys((f"_{name}", f"_{name}_vc", f"_{name}_epoch")))

    def memorise(self: Any, obj: Any, value: Any) -> None:
        if value is None:
            obj.__dict__.update(unknown(self._name))
        else:
            remember(self, obj, value)

    as_of(fake_tensor, memorise)
    if set(vars(fake_tensor.SymNumberMemoDescriptor())) == {"_is_nested_int"}:
        patch.setattr(fake_tensor.SymNumberMemoDescriptor, "__set__", memorise)


def with_quick_updates(patch: pytest.MonkeyPatch) -> None:
    """A tenth of what Inductor takes before code generation goes into fake operands of all nodes, gathered twice, of which
    those alone are read that belong to nodes which are new or read what is."""
    names = ("get_node_storage", "get_fake_args_kwargs", "_is_fake_tensor_same", "rebind_unbacked", "compute_unbacked_bindings")
    if not hasattr(fx_utils, "FakeTensorUpdater") or not all(hasattr(fx_utils, name) for name in names):
        return
    whole, of = fx_utils.FakeTensorUpdater.incremental_update, fx_utils

    @functools.wraps(whole)
    def update(self: Any) -> int:
        if getattr(self, "subgraph_updaters", True):
            return whole(self)
        storages: dict[int, int] = defaultdict(int)
        for node in self.gm.graph.nodes:
            if storage := of.get_node_storage(node):
                storages[storage] += 1
        hashes, readers, updated, env = set(), set(), 0, V.fake_mode.shape_env
        for node in self.gm.graph.nodes:
            hashes.add(key := self.hash_node(node))
            if key in self.processed_hashes and node not in readers:
                continue
            valid, args, kwargs = of.get_fake_args_kwargs(node, self.gm)
            if not valid or not callable(node.target) or hasattr(node.target, "_inductor_lowering_function"):
                continue
            with V.fake_mode, enable_python_dispatcher():
                value = node.target(*args, **kwargs)
            if "val" in node.meta and of._is_fake_tensor_same(value, node.meta["val"], storages, node=node):
                continue
            of.rebind_unbacked(env, node, value)
            node.meta["val"] = value
            updated += 1
            if env and (bindings := of.compute_unbacked_bindings(env, value)):
                node.meta["unbacked_bindings"] = bindings
            if storage := of.get_node_storage(node):
                storages[storage] += 1
            readers.update(node.users)
        self.processed_hashes = hashes
        return updated

    as_of(fx_utils, update)
    patch.setattr(fx_utils.FakeTensorUpdater, "incremental_update", update)
