"""The one wrapper that `prepare` puts around a model, the same under every strategy.

It stands for the user's module: calls go through the strategy, everything else to the module itself, `isinstance`
included. `state_dict` and `load_state_dict` are of the whole model, unprefixed, and collectives where the strategy
shards parameters. When its last reference goes, the strategy's hold on the model is closed. Limits: it cannot be
pickled; `len`, indexing and other operators need `ddl.unwrap(model)`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from ddl_magics.errors import UsageOnRankError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ddl_magics.rank.training import Training


class IncompatibleKeys(NamedTuple):
    """What torch's `load_state_dict` returns too."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Model:
    """A prepared model."""

    _ddl: Training
    _ddl_close: weakref.finalize[Any, Any]

    def __init__(self, training: Training) -> None:
        object.__setattr__(self, "_ddl", training)
        close = weakref.finalize(self, training.close)
        close.atexit = False  # at the end of the process the groups that closing needs may be gone
        object.__setattr__(self, "_ddl_close", close)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that isinstance(model, torch.nn.Module) holds
        return type(self._ddl.prepared.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._ddl.require_whole()
        self._ddl.used = True
        return self._ddl.prepared(*args, **kwargs)

    @property
    def forward(self) -> Callable[..., Any]:
        """The forward through the strategy, with the signature of the module's own."""
        module_forward = self._ddl.prepared.module.forward

        @functools.wraps(module_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return forward

    def state_dict(self, *, prefix: str = "") -> dict[str, torch.Tensor]:
        """Whole weights on the CPU; a collective where the strategy shards parameters, so every rank calls it."""
        return {prefix + name: value for name, value in self._ddl.prepared.full_state_dict().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor], strict: bool = True) -> IncompatibleKeys:
        """Whole weights in; every rank gives the same. `strict=False` takes what fits by name and keeps the rest."""
        missing: list[str] = []
        unexpected: list[str] = []
        if not strict:
            own = self._ddl.prepared.full_state_dict()
            missing = [name for name in own if name not in state]
            unexpected = [name for name in state if name not in own]
            state = own | {name: value for name, value in state.items() if name in own}
        self._ddl.prepared.load_full_state_dict(state)
        return IncompatibleKeys(missing, unexpected)

    def __getattr__(self, name: str) -> Any:
        module = self._ddl.prepared.module
        value = getattr(module, name)
        if name == "generate":
            return functools.wraps(value)(functools.partial(self._generate, value))
        if inspect.ismethod(value) and value.__self__ is module:
            return self._instead_of_module(value)
        return value

    def _instead_of_module(self, method: Any) -> Callable[..., Any]:
        """Wrap a method such that `model = model.to(...)`, `.train()` and their like give the wrapper back."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            return self if result is method.__self__ else result

        return call

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._ddl.require_whole()
        if self._ddl.prepared.sync_generate():
            # A rank that has its last token goes on, or the others would wait for its part of the parameters.
            kwargs.setdefault("synced_gpus", True)
        with self._ddl.autocast(), self._ddl.prepared.inference(whole=False):
            return generate(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ddl.prepared.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._ddl.prepared.module, name)

    def __dir__(self) -> list[str]:
        return dir(self._ddl.prepared.module)

    def __repr__(self) -> str:
        return f"{self._ddl.prepared.strategy.spec.text}: {self._ddl.prepared.module!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the module, as averages of weights do."""
        return copy.deepcopy(self._ddl.prepared.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageOnRankError("A prepared model cannot be pickled", "Save ddl.full_state_dict(model) instead.")


def training_of(model: Any) -> Training | None:
    """What stands behind a wrapper; None for anything else."""
    return model._ddl if type(model) is Model else None  # noqa: SLF001 - of the class above
