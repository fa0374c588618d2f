"""Rows of a model's parameters on each rank, and the hooks of torch's `fully_shard` on and off.

A sharded model is in one of two states. At rest it is the plain module, whose parameters are DTensors that hold this
rank's rows (dimension 0, in N equal parts, the last ones shorter or empty); it cannot compute. Under way torch's hooks
gather and free them. `shard` goes from rest to under way, `rest` comes back; so a model moves to another process group,
precision or device without being whole anywhere.
"""

from __future__ import annotations

import math
import warnings
import weakref
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies.common import broadcast_from_rank_zero
from ddl_magics.strategies.fsdp_blocks import blocks
from ddl_magics.strategies.homes import homes, names_on_meta, read_buffers, replace
from ddl_magics.strategies.pieces import Piece, collect, takes_cpu_tensors
from ddl_magics.strategies.weights import match_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddl_magics.strategies.base import Whole

_refusals: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
"""Hooks of modules at rest, which say so to whoever calls them."""

Successors = dict[nn.Parameter, nn.Parameter]
"""Parameter of the module as it was -> the shard that took its place."""


def mesh_of_all_ranks(device: str) -> DeviceMesh:
    """All ranks in a row over the default process group, without a group of its own."""
    world = dist.group.WORLD
    assert world is not None
    return DeviceMesh.from_group(world, torch.device(device).type)


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether this is the rows of a rank."""
    return isinstance(tensor, DTensor)


# One tensor


def rows_of(length: int, rank: int, size: int) -> slice:
    """Rows of a rank out of `length`, as `torch.chunk` deals them out."""
    each = math.ceil(length / size)
    return slice(min(rank * each, length), min((rank + 1) * each, length))


@torch.no_grad()
def local(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of this rank, without a copy; of a plain tensor, all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def cut(whole: Whole, mesh: DeviceMesh, device: str | torch.device, dtype: torch.dtype | None = None) -> DTensor:
    """Rows of this rank of a whole tensor, read and copied to `device`."""
    shape = torch.Size(whole.shape)
    rows = whole[rows_of(shape[0], mesh.get_local_rank(), mesh.size())].to(device, dtype, copy=True).contiguous()
    return wrap(rows, mesh, shape)


@torch.no_grad()
def wrap(rows: torch.Tensor, mesh: DeviceMesh, shape: torch.Size) -> DTensor:
    """Make the rows of each rank one tensor of `shape`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, (Shard(0),), run_check=False, shape=shape, stride=stride)


@torch.no_grad()
def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Whole tensor on the CPU of every rank, in storage of its own; a collective for what is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    rows, length = tensor.to_local().detach(), tensor.shape[0]
    if not takes_cpu_tensors():
        rows = rows.to(tensor.device_mesh.device_type)
    each, size = math.ceil(length / dist.get_world_size()), dist.get_world_size()
    padded = rows.new_zeros((each, *tensor.shape[1:]))
    padded[: rows.shape[0]] = rows
    whole = rows.new_empty((each * size, *tensor.shape[1:]))
    dist.all_gather(list(whole.chunk(size)), padded)
    return whole[:length].to("cpu")


@torch.no_grad()
def join(tensor: DTensor, to: int, device: str) -> torch.Tensor | None:
    """Whole tensor on the CPU of rank `to`, None on the others; see `pieces.collect`."""
    size, width = dist.get_world_size(), tensor.shape[1:].numel()
    held = [(rank, rows_of(tensor.shape[0], rank, size)) for rank in range(size)]
    pieces = [Piece(rank, rows.start * width, rows.stop * width) for rank, rows in held if rows.start < rows.stop]
    rows = tensor.to_local().reshape(-1)
    whole = collect(pieces, rows, numel=tensor.numel(), rank=dist.get_rank(), to=to, device=device)
    return None if whole is None else whole.view(tensor.shape)


# All parameters of a module


def require_dimensions(module: nn.Module) -> None:
    """Raise UsageOnRankError for parameters that have no rows."""
    scalars = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    if scalars:
        message = f"fsdp shards by rows, and {', '.join(scalars[:3])} of this {type(module).__name__} has no dimension"
        raise UsageOnRankError(message, "Give it the shape (1,).")


@torch.no_grad()
def distribute(module: nn.Module, mesh: DeviceMesh, place: str, working: str, dtype: torch.dtype | None) -> Successors:
    """Replace every parameter by this rank's rows of it, on device `place`; rank 0's values. A collective.

    One parameter at a time is whole on device `working`, where ranks talk. `dtype`: of floating-point parameters from
    now on; None keeps each one's. What is sharded already keeps its rows.
    """
    require_dimensions(module)
    successors: Successors = {}

    def made(old: nn.Parameter) -> nn.Parameter:
        wanted = dtype if old.is_floating_point() else None
        if is_sharded(old):
            new = wrap(old.to_local().to(place, wanted), mesh, old.shape)
        else:
            whole = old.detach().to(working, wanted).contiguous()
            broadcast_from_rank_zero([whole])
            new = cut(whole, mesh, place)
            old.data = old.data.new_empty(0)  # others may hold the object: an optimizer, the user
        successors[old] = nn.Parameter(new, requires_grad=old.requires_grad)
        return successors[old]

    replace(module, made)
    return successors


@torch.no_grad()
def materialise(module: nn.Module, read: Callable[[str], Whole], mesh: DeviceMesh, place: str) -> None:
    """Give every parameter on the meta device this rank's rows, and read no others."""
    require_dimensions(module)
    named = names_on_meta(module)

    def made(old: nn.Parameter) -> torch.Tensor | None:
        return cut(read(named[old]), mesh, place, old.dtype) if old in named else None

    replace(module, made)
    read_buffers(module, read)
    _refuse_calls(module)


def shard(module: nn.Module, mesh: DeviceMesh, *, offload: bool, low_precision: bool) -> None:
    """Lay torch's hooks on a module at rest, block by block; its parameters stay the same objects.

    `low_precision`: blocks are gathered and compute in bf16, gradients are reduced in fp32.
    """
    if module in _refusals:
        _refusals.pop(module).remove()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low_precision else None,
        reduce_dtype=torch.float32 if low_precision else None,
        cast_forward_inputs=False,  # autocast sees to inputs, operation by operation, as under other strategies
    )
    host = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    kept = [(home, home.get()) for home in homes(module)]
    stand_ins: dict[nn.Parameter, nn.Parameter] = {}
    for home, parameter in kept:  # tied places keep one stand-in
        if parameter not in stand_ins:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            stand_ins[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        home.put(stand_ins[parameter])
    parts = [*blocks(module), module]
    for part in parts:
        kind = type(part)
        # Work in place on what is a view drops a hook. The blocks of transformers do none on one another's output,
        # and of logits the root's own hook is dropped, while those of the blocks do all that is needed.
        if kind.__module__.startswith("transformers.") or (part is module and len(parts) > 1):
            warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \({kind.__name__}\) returned a view")
        fully_shard(part, mesh=mesh, mp_policy=policy, offload_policy=host)
        type(part).__name__, type(part).__qualname__ = kind.__name__, kind.__qualname__  # as the user knows it
    for home, parameter in kept:
        home.put(parameter)
    for one in _fsdp_parameters(module):
        one.reset_sharded_param()
    # Whichever part of it is called first, this is the root.
    cast("FSDPModule", module)._get_fsdp_state()._lazy_init()


def rest(module: nn.Module) -> None:
    """Take torch's hooks off again, whatever they were doing; rows stay, gathered parameters are freed."""
    for one in _fsdp_parameters(module):
        one.to_sharded()
        one._post_load_hook_handle.remove()
    for part in list(module.modules()):
        if not isinstance(part, FSDPModule):
            continue
        state = part._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in _groups(state):
            for handles in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for handle in handles.values():
                    handle.remove()
        part.__class__ = type(part).__mro__[2]
        _composable_state._module_state_mapping.pop(part, None)
        for key in [key for key in vars(part) if key.startswith("__composable_api_state_key")]:
            del vars(part)[key]
    for part in module.modules():
        vars(part).pop("_is_fsdp_managed_module", None)
        vars(part).pop("_fsdp_use_orig_params", None)
    _refuse_calls(module)


def _refuse_calls(module: nn.Module) -> None:
    def refuse(called: nn.Module, _: Any) -> None:
        message = f"This {type(called).__name__} is sharded by fsdp, and no rank can compute with its rows alone"
        raise UsageOnRankError(message, "Call what ddl.prepare(model) gives, under --strategy fsdp.")

    _refusals[module] = module.register_forward_pre_hook(refuse)


def reshard(module: nn.Module) -> None:
    """Free what is gathered, so that the module holds its rows alone."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def shards(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters under way as rows, also while the module has them whole; tied ones once."""
    for one in _fsdp_parameters(module):
        yield one.sharded_param


def gathered(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield storages of gathered parameters, empty while none is."""
    for one in _fsdp_parameters(module):
        yield from one.all_gather_outputs


def _fsdp_parameters(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            for group in _groups(part._get_fsdp_state()):
                yield from group.fsdp_params


def _groups(state: Any) -> list[Any]:
    """Torch before 2.11 had one group a module."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


# Whole weights in and out


def full_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """As `weights.full_state`, gathering one parameter at a time; buffers are rank 0's. A collective."""
    reshard(module)
    copies: dict[int, torch.Tensor] = {}
    state = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            copies[id(tensor)] = gather(tensor)
        state[name] = copies[id(tensor)]
    return state


@torch.no_grad()
def load_full_state(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """As `weights.load_full_state`; each rank takes its own rows of what it is given. No collective."""
    reshard(module)
    for tensor, value in match_names(module, state, {}):
        put(tensor, value)


@torch.no_grad()
def put(tensor: torch.Tensor, value: Whole) -> None:
    """Copy a whole tensor in, or this rank's rows of it, in place."""
    if isinstance(tensor, DTensor):
        rows = rows_of(tensor.shape[0], dist.get_rank(), dist.get_world_size())
        tensor.to_local().copy_(value[rows])
    else:
        tensor.copy_(value[...])
