"""Lets the real AxoNN 0.2 run on the CPU with gloo; where a rank has a CUDA device it touches nothing.

AxoNN is written for CUDA and NCCL: it names the device "cuda" and the backend "nccl" outright, waits for the device
where it means its own communication, and uses collectives that gloo lacks or takes in another form. The adapter gives
AxoNN's own modules another `torch` and `torch.distributed`, which differ from the real ones in exactly these names,
and leaves both real modules as they are. The names are module globals, so that the thread which runs the backward
finds them as the forward does.
Limits: AxoNN's pipelines (`G_inter` above 1) and its `optim` are left alone.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODULES = (
    "axonn.communication",
    "axonn.intra_layer.asym_communication",
    "axonn.intra_layer.communication",
    "axonn.intra_layer.conv",
    "axonn.intra_layer.embedding",
    "axonn.intra_layer.fully_connected",
    "axonn.intra_layer.overlap_communication",
)
"""AxoNN's modules that name CUDA or NCCL, or call a collective in a form that gloo lacks."""

_undo: list[Callable[[], None]] = []
"""How to put back what was replaced; empty where nothing is."""


class Overlay(ModuleType):
    """A module seen with some of its names replaced."""

    def __init__(self, module: ModuleType, **names: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(names)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def load(device: str) -> None:
    """Import AxoNN, and adapt it when this rank's device is the CPU. Does nothing the second time."""
    _import()
    if torch.device(device).type == "cpu" and not _undo:
        _install()


def installed() -> bool:
    """Whether AxoNN is adapted in this process."""
    return bool(_undo)


def uninstall() -> None:
    """Put AxoNN's modules back as they were imported."""
    while _undo:
        _undo.pop()()


def _import() -> None:
    """Import AxoNN also where mpi4py is installed without an MPI library.

    AxoNN takes a missing mpi4py, but not one that finds no library (RuntimeError); it needs MPI for pipelines only.
    It also sets `mpi4py.rc.initialize` to False for the whole process, which is put back for the user's own MPI.
    """
    try:
        import mpi4py
    except ImportError:
        importlib.import_module("axonn.intra_layer")
        return
    initialize = mpi4py.rc.initialize
    try:
        importlib.import_module("axonn.intra_layer")
    except RuntimeError:
        sys.modules["mpi4py"] = None  # type: ignore[assignment]  # the import system's own sign for "not there"
        try:
            importlib.import_module("axonn.intra_layer")
        finally:
            sys.modules["mpi4py"] = mpi4py
    finally:
        mpi4py.rc.initialize = initialize


def _install() -> None:
    modules = [importlib.import_module(name) for name in MODULES]
    distributed = Overlay(
        dist,
        new_group=_new_group,
        all_reduce=_all_reduce,
        all_to_all=_all_to_all,
        all_gather_into_tensor=_all_gather_into_tensor,
        reduce_scatter_tensor=_reduce_scatter_tensor,
    )
    cuda = Overlay(
        torch.cuda,
        set_device=_stay_on_cpu,
        current_device=lambda: "cpu",
        synchronize=_wait_for_communication,
    )
    adapted = Overlay(
        torch, distributed=distributed, cuda=cuda, empty=_on_cpu(torch.empty), tensor=_on_cpu(torch.tensor)
    )
    for module in modules:
        for name, replacement in (("torch", adapted), ("dist", distributed)):
            if name in vars(module):
                _replace(module, name, replacement)
    _use_cpu_autocast(importlib.import_module("axonn.intra_layer.fully_connected").AsyncLinear)


def _replace(owner: Any, name: str, replacement: Any) -> None:
    original = vars(owner)[name]
    setattr(owner, name, replacement)
    _undo.append(lambda: setattr(owner, name, original))


def _use_cpu_autocast(function: type[torch.autograd.Function]) -> None:
    """Decorate a custom function anew: AxoNN's decorators ask for the autocast of "cuda" and miss that of the CPU."""
    for name, decorate in (("forward", torch.amp.custom_fwd), ("backward", torch.amp.custom_bwd)):
        plain = inspect.unwrap(getattr(function, name))
        _replace(function, name, staticmethod(decorate(plain, device_type="cpu")))


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return make(*args, device="cpu" if device == "cuda" else device, **kwargs)

    return made


def _stay_on_cpu(device: int) -> None:
    """There is no device to choose."""


def _wait_for_communication() -> None:
    """What AxoNN means by synchronising the device: the collectives that it started are complete."""
    for handle in importlib.import_module("axonn.intra_layer.overlap_communication").handles:
        if handle is not None:
            handle.wait()


def _new_group(ranks: Sequence[int], backend: str) -> Any:
    return dist.new_group(ranks=[int(rank) for rank in ranks], backend="gloo" if backend == "nccl" else backend)


def _all_reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """AxoNN calls this along every direction of the grid, also where it is one rank wide."""
    return None if dist.get_world_size(group) == 1 else dist.all_reduce(tensor, group=group, async_op=async_op)


def _all_gather_into_tensor(
    output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Gloo wants at least one dimension where NCCL takes a number.

    It also copies in a thread of its own, where autograd is on and a weight would be recorded.
    """
    tensor = tensor.detach()
    if dist.get_world_size(group) == 1:
        output.copy_(tensor.reshape(output.shape))
        return None
    gather = _newer("all_gather_single", "all_gather_into_tensor")
    return gather(output, tensor.reshape(1) if tensor.dim() == 0 else tensor, group=group, async_op=async_op)


def _reduce_scatter_tensor(
    output: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    return _newer("reduce_scatter_single", "reduce_scatter_tensor")(output, tensor, group=group, async_op=async_op)


def _newer(name: str, older: str) -> Callable[..., Any]:
    """A collective by the name that torch 2.13 gave it, where torch has that: the older name warns there."""
    return cast("Callable[..., Any]", getattr(dist, name, None) or getattr(dist, older))


def _all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None) -> None:
    """Gloo has this for one flat tensor with split sizes only."""
    if len(outputs) == 1:
        outputs[0].copy_(inputs[0])
        return
    sent = torch.cat([tensor.reshape(-1) for tensor in inputs])
    received = sent.new_empty(sum(tensor.numel() for tensor in outputs))
    dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=[tensor.numel() for tensor in outputs],
        input_split_sizes=[tensor.numel() for tensor in inputs],
        group=group,
    )
    for tensor, piece in zip(outputs, torch.split(received, [tensor.numel() for tensor in outputs]), strict=True):
        tensor.copy_(piece.view_as(tensor))
