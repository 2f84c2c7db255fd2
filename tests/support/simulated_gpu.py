"""A GPU that is not there: tensors that say they are on `cuda:0`, hold their numbers on the CPU and mix with no others.

Within `simulated_gpu()` torch sees one GPU. Operators on its tensors run on the CPU's numbers, but with operands on
two devices they fail as on a GPU, so that a tensor forgotten on the host is found on every machine. Not seen: speed,
memory, streams, and operators that a GPU does not have.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
aten = torch.ops.aten

# Operators whose operands may lie on two devices: copies; and those where only the indices, second, may be on the host.
COPYING = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# What only GPUs have.
MISSING = {aten.mm.dtype: lambda left, right, dtype: left.to(dtype) @ right.to(dtype)}

# Torch wants somebody who switches devices; for this one there is nothing to do.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""


class GpuTensor(torch.Tensor):
    """A tensor on the GPU with its numbers in `host`. A parameter whose data is set to one gets a `host` as well."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> GpuTensor:
        tensor: GpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=GPU,
            requires_grad=host.requires_grad,
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.host.tolist()

    def __repr__(self) -> str:
        return f"GpuTensor({self.host})"


def is_on_gpu(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, item) for item in value)
    return change(value)


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return CPU if leaf.type == "cuda" else leaf
    return leaf.host if is_on_gpu(leaf) else leaf


def _refuse_strangers(func: Any, operands: Any) -> None:
    tensors = [leaf for leaf in _leaves(operands) if isinstance(leaf, Tensor)]
    if any(map(is_on_gpu, tensors)) and any(not is_on_gpu(tensor) and tensor.dim() for tensor in tensors):
        places = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {places}")


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`func` on the host's numbers, with its results where a GPU would have them."""
    if func._can_decompose():
        with Operators():
            return func.decompose(*args, **kwargs)
    leaves = list(_leaves((args, list(kwargs.values()))))
    target = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    any_on_gpu = any(map(is_on_gpu, leaves))
    if func in INDEXING and is_on_gpu(args[0]):
        _refuse_strangers(func, (args[0], args[2:]))
    elif func not in COPYING:
        _refuse_strangers(func, leaves)

    run = MISSING.get(func, func)
    out = run(*_mapped(_on_host, args), **{name: _mapped(_on_host, value) for name, value in kwargs.items()})
    if target is not None:
        stays = target.type == "cuda"
    else:
        stays = is_on_gpu(args[0]) if func is aten.copy_.default else any_on_gpu
    if not stays:
        return out
    wrapped = _mapped(lambda leaf: GpuTensor(leaf) if isinstance(leaf, Tensor) else leaf, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if any_on_gpu else wrapped


class Operators(TorchDispatchMode):
    """Sees every operator: those that make tensors on the GPU, and those on parameters that moved there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what torch does otherwise takes longer than most operators here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = _leaves((args, list(kwargs.values())) if kwargs else args)
        if any(leaf.device.type == "cuda" if isinstance(leaf, Tensor) else leaf == GPU for leaf in leaves):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


class Functions(TorchFunctionMode):
    """Gives "cuda" its number, and does for the GPU what torch does not ask operators for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if any(map(_is_cuda, args)):
            args = tuple(GPU if _is_cuda(argument) else argument for argument in args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": GPU}
        special = SPECIAL.get(func)
        return func(*args, **kwargs) if special is None else special(func, args, kwargs)


def _is_cuda(value: object) -> bool:
    return value.__class__ in (str, torch.device) and str(value) in ("cuda", "cuda:0")


def _pointer(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].host if is_on_gpu(args[0]) else args[0], **kwargs)


def _make(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("device") != GPU:
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "device": CPU}).to(GPU)


def _deepcopy(func: Any, args: Any, kwargs: Any) -> Any:
    if not is_on_gpu(args[0]):
        return func(*args, **kwargs)
    return args[1].setdefault(id(args[0]), args[0].clone())


def _set_data(func: Any, args: Any, kwargs: Any) -> Any:
    func(*args, **kwargs)
    if is_on_gpu(args[1]):
        args[0].host = args[1].host


SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.data_ptr: _pointer,
    torch.tensor: _make,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.data.__set__: _set_data,
}


def _submit_here(_: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(work(*args, **kwargs))
    except Exception as error:
        future.set_exception(error)
    return future


def load_guard(folder: Path) -> None:
    """Compile and load what torch's C++ asks of a device; the process keeps it, in the place of torch's own."""
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD, encoding="utf-8")
    torch_folder = Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library)]
    paths = [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"]
    subprocess.run([*command, *paths], check=True)
    ctypes.CDLL(str(library))


@contextmanager
def simulated_gpu() -> Iterator[None]:
    """One GPU for this thread, after `load_guard`; work for other threads is done here."""
    answers = {
        "_lazy_init": None,
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "empty_cache": None,
        "mem_get_info": (8 << 30, 8 << 30),
        "get_device_properties": SimpleNamespace(name="Simulated GPU", multi_processor_count=8, major=9, minor=0),
        "current_stream": SimpleNamespace(cuda_stream=None, synchronize=lambda: None, wait_stream=lambda _: None),
        "default_stream": None,
        "device": nullcontext(),
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        stack.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", _submit_here))
        # Tensors of inference mode refuse what results of such operators need.
        stack.enter_context(mock.patch.object(torch._C, "_InferenceMode", side_effect=lambda _: torch.no_grad()))
        stack.enter_context(Functions())
        stack.enter_context(Operators())
        yield
