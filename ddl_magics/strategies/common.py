"""What strategies share on a rank: who owns a module, precision, the same start, clipping, counting bytes.

Loaded only where torch is. Nothing here knows a particular library; a strategy that keeps whole modules gets all of
`Prepared` from `ModulePrepared`.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddl_magics.errors import UsageOnRankError
from ddl_magics.strategies.kept import KeptByParameter
from ddl_magics.strategies.weights import full_state, load_full_state

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from ddl_magics.strategies.base import Prepared, Strategy, Training

BYTES_PER_BUCKET = 25 * 2**20
"""Tensors are broadcast in flat buckets of about this size, as DDP does when it starts."""

_owners: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Prepared]] = weakref.WeakKeyDictionary()


def claim(prepared: Prepared) -> Prepared:
    """Note that `prepared` owns its module until it is closed, take a first look at its memory, and return it."""
    prepared.looks.at("prepare", prepared.measure)
    _owners[prepared.module] = weakref.ref(prepared)
    return prepared


def release(prepared: Prepared) -> None:
    """Forget that `prepared` owns its module, so that the module can be prepared again."""
    if current_owner(prepared.module) is prepared:
        del _owners[prepared.module]


def current_owner(module: torch.nn.Module) -> Prepared | None:
    """The open `Prepared` that owns `module`, if any."""
    reference = _owners.get(module)
    return reference() if reference is not None else None


def require_free(module: torch.nn.Module, *, sharded: str = "") -> None:
    """Raise UsageOnRankError for a module that cannot be prepared as it is.

    Either a prepared model that is still open owns it, and two wrappers would reduce its gradients twice; or its
    parameters are shards, which only the strategy that made them takes: `zero:3` or `fsdp`, if `sharded` names it.
    """
    owner = current_owner(module)
    kind = type(module).__name__
    if owner is not None:
        message = f"This {kind} is prepared already, under {owner.strategy.spec.text}"
        raise UsageOnRankError(message, "Build it anew before the second prepare.")
    by = sharded_by(module)
    if by not in {"", sharded}:
        message = f"This {kind} was sharded by {by}, and another strategy cannot take it"
        raise UsageOnRankError(message, "Build it in the cell that prepares it.")


def sharded_by(module: torch.nn.Module) -> str:
    """Whose shards the parameters are: `zero:3`, `fsdp`, or nobody's."""
    parameters = list(module.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return "zero:3"
    return "fsdp" if any(hasattr(parameter, "device_mesh") for parameter in parameters) else ""


def unprepared(module: torch.nn.Module, strategy: Strategy) -> UsageOnRankError:
    """Give the error for a module whose shards cannot compute, since it is not prepared, or not any more."""
    message = f"This {type(module).__name__} is shards of {strategy.spec.text}, which compute only when it is prepared"
    return UsageOnRankError(message, "Write model = ddl.prepare(model) before.")


def note_on_groups(optimizer: torch.optim.Optimizer | None, *, sharded: bool) -> tuple[str, ...]:
    """A sentence where groups may have been chosen by shapes that flat shards do not have."""
    if optimizer is None or not sharded or len(optimizer.param_groups) == 1:
        return ()
    text = "This model came as flat shards, with one dimension or none where a matrix was"
    return (f"{text}: choose the optimizer's groups by name, not by shape.",)


# Optimizers

BY_MATRIX = frozenset({"Adafactor", "LARS", "LBFGS", "Lamb", "Muon", "SOAP", "Shampoo", "SparseAdam"})
"""Optimizers, of torch and known others, that do not work element by element."""


def refuse_by_matrix(optimizer: torch.optim.Optimizer | None, gets: str, *, fit: Collection[str] = ()) -> None:
    """Raise UsageOnRankError for an optimizer that would train otherwise on parts of a weight than on the whole.

    `gets`: what the strategy gives it, for the message. `fit`: those of BY_MATRIX that can take that.
    """
    kind = type(optimizer).__name__
    if kind in BY_MATRIX and kind not in fit:
        message = f"{kind} looks at a weight as a matrix or at all of them at once, and {gets}"
        raise UsageOnRankError(message, "Use one that works element by element, such as AdamW or SGD.")


# Precision


def autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    """What a forward runs under: autocast to bf16 for both bf16 precisions, nothing for `32`.

    Under `bf16-true` it keeps buffers and inputs that stay in fp32 (positions, normalisation statistics) from
    meeting bf16 weights in a matrix product that wants one dtype.
    """
    if precision == "32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


def cast_parameters(module: torch.nn.Module, precision: str) -> None:
    """Under `bf16-true`, put floating-point parameters into bf16 in place; buffers keep their dtype.

    The Parameter objects stay, so that an optimizer made before holds them still.
    """
    if precision != "bf16-true":
        return
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)


# Same start


@torch.no_grad()
def broadcast_from_rank_zero(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank rank 0's values, in place, in buckets of one dtype and device. A collective."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (bucket[0].dtype, bucket[0].device) != (tensor.dtype, tensor.device):
            _broadcast_bucket(bucket)
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= BYTES_PER_BUCKET:
            _broadcast_bucket(bucket)
            bucket, size = [], 0
    if bucket:
        _broadcast_bucket(bucket)


def _broadcast_bucket(bucket: list[torch.Tensor]) -> None:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
    dist.broadcast(flat, src=0)
    offset = 0
    for tensor in bucket:
        tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()


# Bytes


def bytes_by_kind(**kinds: Iterable[torch.Tensor | None]) -> dict[str, int]:
    """Bytes of the storages behind the tensors of each kind; a storage counts once, under the first kind that has it.

    Reads sizes only: no device is touched.
    """
    seen: set[int] = set()
    sizes = {}
    for kind, tensors in kinds.items():
        sizes[kind] = 0
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if size and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[kind] += size
    return sizes


def state_tensors(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    """Tensors of an optimizer's state (moments, counters), at any depth of dict, list or tuple."""
    if optimizer is not None:
        yield from tensors_in(list(optimizer.state.values()))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors at any depth of dict, list or tuple."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in list(value.values()):
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


# A model whose parameters stay whole on each rank


class ModulePrepared(KeptByParameter):
    """A prepared model whose parameters are whole on this rank: everything but how gradients travel."""

    def __init__(
        self,
        strategy: Strategy,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        training: Training,
    ) -> None:
        require_free(module)
        cast_parameters(module, training.precision)
        module.to(strategy.world.device)
        self.strategy = strategy
        self.module = module
        self.optimizer = optimizer
        self.training = training
        if optimizer is not None:
            self.updates.watch(optimizer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with autocast(self.strategy.world.device, self.training.precision):
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, boundary: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.looks.at("backward", self.measure)

    def step(self, max_norm: float | None) -> torch.Tensor | None:
        optimizer = required_optimizer(self)
        norm = None
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        optimizer.step()
        self.zero_grad(optimizer)
        self.looks.at("step", self.measure)
        return norm

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients, also of parameters that the optimizer does not hold."""
        optimizer.zero_grad(set_to_none=True)
        self.module.zero_grad(set_to_none=True)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        return full_state(self.module)

    def load_full_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        load_full_state(self.module, state)

    def rebind(self) -> None:
        drop_gradients(self.module, self.optimizer)

    def measure(self) -> dict[str, int]:
        parameters = list(self.module.parameters())
        return bytes_by_kind(
            parameters=parameters,
            gradients=[parameter.grad for parameter in parameters],
            optimizer=state_tensors(self.optimizer),
        )

    def close(self) -> None:
        self.updates.forget()
        release(self)


def drop_gradients(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Forget all gradients, their storage too, also of parameters that only the optimizer or only the module has."""
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    for parameter in module.parameters():
        parameter.grad = None


def required_optimizer(prepared: Prepared) -> torch.optim.Optimizer:
    """The prepared optimizer; UsageOnRankError where prepare was given none."""
    if prepared.optimizer is None:
        message = "step needs an optimizer and prepare was given none"
        raise UsageOnRankError(message, "Write model, optimizer = ddl.prepare(model, optimizer).")
    return prepared.optimizer
