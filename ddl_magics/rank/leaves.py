"""Takes a value apart into what ranks can compare: tensors and plain values, each with the path that leads to it.

Containers give their items, modules their parameters and buffers, optimizers the state of each parameter by index and
the settings of their groups, schedulers their `state_dict`, prepared models and prepared loaders what they stand for.
Any other object gives its attributes, down to DEPTH objects inside one another. Limits: loaders and datasets are
compared by type and lengths only, since ranks are meant to read different samples; of what has neither a pickle nor a
repr that says more than its type, only the type is compared.
"""

from __future__ import annotations

import random
import types
import warnings
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from ddl_magics.rank import digest, parts
from ddl_magics.rank.model import training_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddl_magics.rank.shards import Shards

DEPTH = 8
"""How deep objects are entered."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.Size)
"""Values whose repr tells them apart."""

NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
"""Values that are known by their names."""


@dataclass
class Leaf:
    """A tensor or a plain value."""

    path: str
    value: Any
    kind: str = ""
    """What it is counted as: `parameter`, `buffer`, `random state`, or empty."""
    key: str = ""
    """Shard key, see `rank.shards`."""
    shape: tuple[int, ...] = ()
    """Of the whole tensor."""
    numpy: bool = False
    """Whether it is an array, which is on no device."""


@dataclass
class Walk:
    """Goes through one value."""

    shards: Shards
    _entered: set[int] = field(default_factory=set)
    """Objects on the way to here: a value that holds itself is not entered again."""

    def leaves(self, value: Any, path: str = "", depth: int = 0) -> Iterator[Leaf]:
        """Leaves of a value, in an order that is the same for equal values."""
        training = training_of(value)
        if training is not None:
            value = training.prepared.module
        if isinstance(value, torch.Tensor):
            yield self._tensor(path, value)
        elif isinstance(value, (*PLAIN, *NAMED)):
            yield Leaf(path, value)
        elif id(value) in self._entered or depth > DEPTH:
            yield Leaf(path, type(value))
        else:
            self._entered.add(id(value))
            try:
                yield from self._inside(value, path, depth + 1)
            finally:
                self._entered.remove(id(value))

    def _inside(self, value: Any, path: str, depth: int) -> Iterator[Leaf]:
        if isinstance(value, torch.nn.Module):
            yield from self._module(value, path)
        elif isinstance(value, torch.optim.Optimizer) or _is_like_optimizer(value):
            yield from self._optimizer(value, path, depth)
        elif parts.is_schedule(value):
            yield from self.leaves(value.state_dict(), path, depth)
        elif isinstance(value, torch.Generator):
            yield self._tensor(path, value.get_state())
        elif isinstance(value, random.Random):
            yield Leaf(path, repr(value.getstate()))
        elif isinstance(value, DataLoader | Dataset):
            yield from self._data(value, path)
        else:
            yield from self._plain(value, path, depth)

    def _plain(self, value: Any, path: str, depth: int) -> Iterator[Leaf]:
        """What Python and numpy know."""
        if isinstance(value, Mapping):
            yield from self._items({f"[{key!r}]": item for key, item in value.items()}, path, depth)
        elif isinstance(value, list | tuple):
            names = getattr(value, "_fields", None)
            keys = [f".{name}" for name in names] if names else [f"[{i}]" for i in range(len(value))]
            yield from self._items(dict(zip(keys, value, strict=True)), path, depth)
        elif isinstance(value, AbstractSet):
            yield Leaf(path, "{" + ", ".join(sorted(map(repr, value))) + "}")
        elif _is_array(value):
            yield from self._array(value, path, depth)
        else:
            yield from self._object(value, path, depth)

    def _items(self, items: dict[str, Any], path: str, depth: int) -> Iterator[Leaf]:
        if not items:
            yield Leaf(path, "empty")
        for key, item in items.items():
            yield from self.leaves(item, path + key, depth)

    def _tensor(self, path: str, tensor: torch.Tensor, kind: str = "", key: str = "") -> Leaf:
        held = self.shards.held(tensor)
        return Leaf(path, held.local, kind, held.key or key, held.shape)

    def _module(self, module: torch.nn.Module, path: str) -> Iterator[Leaf]:
        """Each tensor once, under its first name; buffers that are not saved too."""
        self.shards.learn(module)
        for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, tensor in tensors:
                yield self._tensor(f"{path}.{name}", tensor, kind)
        yield Leaf(f"{path}.training", module.training)

    def _optimizer(self, optimizer: Any, path: str, depth: int) -> Iterator[Leaf]:
        """State by the parameter's index over all groups, as in `state_dict`, then the groups' settings."""
        key = self.shards.of_optimizer(optimizer)
        grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = {id(parameter) for parameter in grouped}
        lent = [parameter for parameter in optimizer.state if id(parameter) not in known]  # by ZeRO 3, while it steps
        for index, parameter in enumerate([*grouped, *lent]):
            shard = self.shards.held(parameter)
            for name, value in optimizer.state.get(parameter, {}).items():
                entry = f"{path}.state[{index}][{name!r}]"
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    yield self._tensor(entry, value, key=key or shard.key)
                else:  # a step count is the same for all shards
                    yield from self.leaves(value, entry, depth)
        for index, group in enumerate(optimizer.param_groups):
            settings = {f"[{name!r}]": value for name, value in group.items() if name not in ("params", "param_names")}
            yield from self._items(settings, f"{path}.param_groups[{index}]", depth)

    @staticmethod
    def _data(value: Any, path: str) -> Iterator[Leaf]:
        yield Leaf(path, f"{type(value).__name__}, {_length(value)}")
        if isinstance(value, DataLoader):
            yield Leaf(f"{path}.dataset", f"{type(value.dataset).__name__}, {_length(value.dataset)}")
            yield Leaf(f"{path}.batch_size", value.batch_size)

    def _array(self, array: Any, path: str, depth: int) -> Iterator[Leaf]:
        """A numpy array or number; what torch has no type for (texts, dates, objects) goes as a list."""
        kind, size = array.dtype.kind, array.dtype.itemsize
        if kind in "biufc" and size <= torch.complex128.itemsize and array.dtype.isnative:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes
                tensor = torch.as_tensor(array if array.ndim and min(array.strides) >= 0 else array.copy())
            yield Leaf(path, tensor, shape=tuple(array.shape), numpy=True)
        else:
            yield from self.leaves([str(array.dtype), array.tolist()], path, depth)

    def _object(self, value: Any, path: str, depth: int) -> Iterator[Leaf]:
        try:
            attributes = dict(vars(value))
        except TypeError:
            attributes = {}
        if not attributes:
            yield Leaf(path, value)
            return
        yield from self._items({f".{name}": item for name, item in attributes.items()}, path, depth)


def _is_like_optimizer(value: Any) -> bool:
    """Wrappers of DeepSpeed and Accelerate are no subclass."""
    return all(hasattr(value, name) for name in ("param_groups", "state", "step", "zero_grad"))


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array_interface__") and hasattr(value, "dtype")


def _length(value: Any) -> str:
    try:
        return f"length {len(value)}"
    except Exception:  # noqa: BLE001 - a dataset is the user's code, and need not have one
        return "no length"


def random_states() -> Iterator[Leaf]:
    """The random states of this rank, by whose they are, each as one digest."""
    import numpy as np

    state: Any = np.random.get_state()  # noqa: NPY002 - the global state is what cells draw from
    states = {
        "torch": digest.of_tensor(torch.get_rng_state()),
        "numpy": digest.of_text(f"{state[0]} {state[1].tolist()} {state[2:]}"),
        "python": digest.of_text(repr(random.getstate())),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = digest.of_tensor(torch.cuda.get_rng_state())
    for name, mark in states.items():
        yield Leaf(f".{name}", mark, "random state")
