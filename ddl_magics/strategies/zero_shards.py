"""Parameters that DeepSpeed holds as shards (ZeRO stage 3): making them, reading and writing them whole.

`deepspeed.zero.Init` used as a context shards each module as it is built, and then Hugging Face's initialisation
skips what is sharded already: other weights than one process gets. So modules are built whole on the host, and
sharded by `prepare`; the Parameter objects stay the same, for optimizers made over them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.strategies import weights

if TYPE_CHECKING:
    from collections.abc import Callable

_sharded: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Modules with parameters of ours that are shards."""


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed holds this parameter as shards."""
    return hasattr(parameter, "ds_id")


def is_whole_now(parameter: Any) -> bool:
    """Whether this rank has all of a sharded parameter at the moment, as it keeps small ones."""
    return bool(parameter.ds_status is type(parameter.ds_status).AVAILABLE)


def shard(module: torch.nn.Module, *, offload: bool, by: Callable[..., Any] | None = None) -> None:
    """Split the parameters of a module over all ranks, with rank 0's values. A collective.

    `offload` keeps the shards on the host. What is sharded already stays as it is. `by`: stands for `zero.Init`.
    """
    from deepspeed import zero

    if any(not is_sharded(parameter) for parameter in module.parameters()):
        (by or zero.Init)(
            module=module,
            dtype=torch.float32,
            mem_efficient_linear=False,  # it would replace torch.nn.functional.linear for the whole process
            remote_device="cpu" if offload else None,
        )
    _sharded.add(module)


def rebind() -> None:
    """Let every sharded module that lives use the present world group, and be nothing but shards again.

    A failure may have left parameters whole, or on their way, with modules of the forward still counted as users.
    """
    from deepspeed import comm, zero
    from deepspeed.runtime.zero.partition_parameters import free_param

    world = comm.get_world_group()
    for module in _sharded:
        for parameter in _shards_of(module):
            parameter.ds_process_group = world
            # The functions that DeepSpeed hangs on a parameter share the object that sharded it, and take its group.
            parts = [cell.cell_contents for cell in parameter.all_gather.__closure__]
            next(part for part in parts if isinstance(part, zero.Init)).ds_process_group = world
            parameter.ds_active_sub_modules.clear()
            free_param(parameter)
        for part in module.modules():
            getattr(part, "ds_inflight_param_registry", {}).clear()
            if hasattr(part._parameters, "_in_forward"):  # noqa: SLF001 - DeepSpeed's dictionary, it gathers on access
                part._parameters._in_forward = False  # noqa: SLF001


def _shards_of(module: torch.nn.Module) -> list[Any]:
    return [parameter for parameter in module.parameters() if is_sharded(parameter)]


def full_shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    """Whole shape of every sharded parameter, by name."""
    return {name: tensor.ds_shape for name, tensor in module.state_dict(keep_vars=True).items() if is_sharded(tensor)}


def full_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """As `weights.full_state`, gathering one parameter at a time. A collective."""
    from deepspeed import zero

    copies: dict[int, torch.Tensor] = {}
    state = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in copies:
            with zero.GatheredParameters([tensor], enabled=is_sharded(tensor)):
                copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
        state[name] = copies[id(tensor)]
    return state


@torch.no_grad()
def load_full_state(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """As `weights.load_full_state`, one parameter at a time; rank 0's values win. A collective."""
    from deepspeed import zero

    for tensor, value in weights.match_names(module, state, full_shapes(module)):
        with zero.GatheredParameters([tensor], modifier_rank=0, enabled=is_sharded(tensor)):
            tensor.copy_(value)


def cast_shards(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Change the dtype of parameters that are sharded already."""
    for parameter in _shards_of(module):
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
            parameter.ds_tensor.data = parameter.ds_tensor.data.to(dtype)
