# ruff: noqa: SLF001 - DeepSpeed's private names are what this module is for
"""What we need of DeepSpeed beyond its public interface, in one place: start, end, and where it holds its tensors.

Written against DeepSpeed 0.19; the names read here are those of `runtime/zero/stage_1_and_2.py` and `stage3.py`.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import warnings
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddl_magics.strategies.base import Strategy

_users: weakref.WeakSet[Strategy] = weakref.WeakSet()

OPEN_MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"

COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""An engine's counters, which its reports and schedules of features read."""

DEPRECATED = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
"""What torch 2.13 says at each of DeepSpeed 0.19's collectives; the user can do nothing about it."""


def join(strategy: Strategy) -> None:
    """Start DeepSpeed's communication over the process group that exists, on the device of this rank."""
    device = torch.device(strategy.world.device).type
    os.environ.setdefault("DS_ACCELERATOR", device)
    os.environ.setdefault("LOCAL_RANK", str(strategy.world.local_rank))  # zero.Init reads it
    warnings.filterwarnings("ignore", DEPRECATED, FutureWarning)
    import deepspeed
    from deepspeed.comm import comm

    backend: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute, that name is torch itself
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    if comm.cdb is None:
        build_shm_op = backend.build_shm_op
        # On CPUs it would compile an operator for its inference engine, and announce that on stdout.
        backend.build_shm_op = lambda: None
        try:
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        finally:
            backend.build_shm_op = build_shm_op
    _users.add(strategy)
    forget_old_world()


def _is_news(record: logging.LogRecord) -> bool:
    """DeepSpeed warns of every optimizer that it does not list; parity tests say more about that."""
    return "untested optimizer" not in record.getMessage()


def leave(strategy: Strategy) -> None:
    """Free DeepSpeed's copy of the world group when the last strategy that uses it is closed."""
    _users.discard(strategy)
    if not _users:
        reset()


def reset() -> None:
    """End DeepSpeed's clone of the world group, and forget it."""
    from deepspeed.utils import groups

    forget_old_world()
    clone, groups._WORLD_GROUP = groups._WORLD_GROUP, None
    if clone is not None:
        dist.destroy_process_group(clone)


def forget_old_world() -> None:
    """Forget the clone where it is no group of the present world.

    DeepSpeed makes it at its first use and keeps it for good, whatever becomes of the world that it is a clone of.
    """
    from deepspeed.utils import groups

    if not dist.is_initialized() or groups._WORLD_GROUP not in dist.distributed_c10d._world.pg_map:
        groups._WORLD_GROUP = None


def clone_world() -> None:
    """Make DeepSpeed's clone of the present world now and not at its first use; a collective.

    A rank that waits for others to make a group waits at the store, and no failing rank can free it from there: so
    groups are made where little else can fail.
    """
    from deepspeed.utils import groups

    forget_old_world()
    groups._clone_world_group()


def initialize(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None, config: dict[str, Any]) -> Any:
    """Make a DeepSpeed engine.

    Open MPI counts local ranks in an order of its own, and where a task sees one GPU of its own `LOCAL_RANK` is 0;
    DeepSpeed refuses to start where the two differ.
    """
    import deepspeed

    counted = os.environ.get(OPEN_MPI_LOCAL_RANK)
    if counted is not None:
        os.environ[OPEN_MPI_LOCAL_RANK] = os.environ["LOCAL_RANK"]
    try:
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    finally:
        if counted is not None:
            os.environ[OPEN_MPI_LOCAL_RANK] = counted
    return engine


def before_reduction(engine: Any, action: Callable[[], None]) -> None:
    """Call `action` in each backward when all gradients are there, before the engine reduces and frees them."""
    reduce = type(engine).allreduce_gradients
    itself = weakref.ref(engine)  # else the engine would hold itself

    def reduce_after_action(*args: Any, **kwargs: Any) -> Any:
        action()
        return reduce(itself(), *args, **kwargs)

    engine.allreduce_gradients = reduce_after_action


@contextmanager
def linear_that_regathers() -> Iterator[None]:
    """Stage 3: `torch.nn.functional.linear` that does not keep the gathered weight alive until the backward.

    DeepSpeed's own switch (`memory_efficient_linear`) replaces the function for good, also for the next strategy.
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    original = torch.nn.functional.linear
    torch.nn.functional.linear = zero3_linear_wrap
    try:
        yield
    finally:
        torch.nn.functional.linear = original


def drop_second_copy(optimizer: Any) -> None:
    """Let the optimizer update the weights themselves where DeepSpeed made a copy of them in the same dtype.

    It keeps "master" weights beside the model's, for models in 16 bit; for fp32 models that is a second copy of the
    shard, which the theory does not have. With offload the copy has a purpose, and stays.
    """
    if is_stage_3(optimizer):
        masters = optimizer.fp32_partitioned_groups_flat
        weights = [None] * len(masters) if optimizer.offload_optimizer else optimizer.fp16_partitioned_groups_flat
    else:
        masters = optimizer.single_partition_of_fp32_groups
        weights = [
            None if optimizer.cpu_offload else parts[dist.get_rank(group)]
            for parts, group in zip(
                optimizer.parallel_partitioned_bit16_groups, optimizer.real_dp_process_group, strict=True
            )
        ]
    for master, weight in zip(masters, weights, strict=True):
        if weight is not None and (master.dtype, master.device) == (weight.dtype, weight.device):
            master.data = weight.data
    optimizer._link_all_hp_params()  # its views of the master weights, for checkpoints


def is_stage_3(optimizer: Any) -> bool:
    """Whether this optimizer of DeepSpeed's shards the parameters too."""
    return hasattr(optimizer, "fp32_partitioned_groups_flat")


def gradients(optimizer: Any) -> Iterator[torch.Tensor | None]:
    """Tensors in which DeepSpeed holds gradients now, beside `parameter.grad`.

    Its communication buckets are not among them: their size is a setting, not a share.
    """
    from ddl_magics.strategies.common import tensors_in

    if is_stage_3(optimizer):
        yield optimizer.grad_partitions_flat_buffer
        yield from (master.grad for master in optimizer.fp32_partitioned_groups_flat)
        return
    yield from (master.grad for master in optimizer.single_partition_of_fp32_groups)
    yield from (getattr(p, "grad_accum", None) for group in optimizer.bit16_groups for p in group)
    yield from tensors_in([optimizer.averaged_gradients, optimizer.all_grad_tensors])
    yield from tensors_in(getattr(optimizer, "accumulated_grads_in_cpu", {}))


def masters(optimizer: Any) -> list[torch.Tensor]:
    """The weights that the inner optimizer updates: views of the parameters, or a copy in higher precision."""
    if is_stage_3(optimizer):
        return list(optimizer.fp32_partitioned_groups_flat)
    return list(optimizer.single_partition_of_fp32_groups)


def unlink_states(optimizer: Any) -> None:
    """Stages 1 and 2: drop the views of the inner optimizer's state that hang on each parameter.

    DeepSpeed makes them after its first step, for `safe_get_full_optimizer_state`, and never again.
    """
    if is_stage_3(optimizer):
        return
    optimizer._hp_optimizer_states_linked = False
    for group in optimizer.bit16_groups:
        for parameter in group:
            if parameter._hp_mapping is not None:
                parameter._hp_mapping.optim_fragment = None


def link_states(optimizer: Any) -> None:
    """Make those views where all of the state is there."""
    if not is_stage_3(optimizer) and all(master in optimizer.optimizer.state for master in masters(optimizer)):
        optimizer._lazy_init_hp_params_optimizer_state()


def count_on(engine: Any, steps: int) -> None:
    """Set an engine's counters to where they are after that many optimizer steps, none of them skipped."""
    engine.global_steps = engine.micro_steps = steps
    engine.global_samples = steps * engine.train_batch_size()
    engine.skipped_steps = 0


def spread_masters(optimizer: Any) -> None:
    """Give the weights that each rank's inner optimizer has to the models of all; a collective in stages 1 and 2."""
    if is_stage_3(optimizer):
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
    else:
        optimizer.update_lp_params()


def settle(engine: Any) -> None:
    """Stage 3: free what a forward has begun to gather ahead for a backward that has not come.

    Such a parameter is neither a shard nor whole, and DeepSpeed refuses to gather it for anybody else.
    """
    owner = getattr(engine.optimizer, "parameter_offload", engine.optimizer)  # the latter without an optimizer
    if hasattr(owner, "get_param_coordinator"):
        owner.get_param_coordinator()._clean_inflight_param_registry()


def destroy(engine: Any) -> None:
    """End an engine, also one that broke off in the middle, and take from the module what DeepSpeed leaves on it."""
    from deepspeed.runtime.zero import parameter_offload

    module = engine.module
    engine.destroy()
    for hook in ("module_forward_pre_hook", "module_forward_post_hook"):
        getattr(engine, hook).remove()
    stack, own = parameter_offload.FWD_MODULE_STACK, set(module.modules())
    stack[:] = [kept for kept in stack if kept not in own]  # those whose forward broke off are there too
    for parameter in module.parameters():
        parameter.grad = None
        for name in ("_hp_mapping", "_zero_optimizer", "_z3_optimizer", "grad_accum", "comm_dtype"):
            if hasattr(parameter, name):
                delattr(parameter, name)
    _clear_caches(parameter_offload.PartitionedParameterCoordinator)
    engine.optimizer = None
    gc.collect()  # engine, optimizer and hooks refer to one another


def _clear_caches(kind: type) -> None:
    """Clear the caches of a class's methods, which hold their arguments, modules among them, for good."""
    for method in vars(kind).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
