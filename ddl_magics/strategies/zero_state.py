"""What a checkpoint keeps of a model under ZeRO: weights, masters where they are more exact, and the optimizer's state.

The user's optimizer works on flat tensors that hold a share of many parameters (`zero_layout`), and has one count of
steps for each of them. Here that becomes a state by parameter, as torch's optimizers have in one process, and the
other way round. Limits: parameters of one group that count their steps differently cannot stay so; a parameter that
was never used has a state of zeros here, and none in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.strategies import zero_layout, zero_library, zero_shards
from ddl_magics.strategies.base import Entry
from ddl_magics.strategies.kept import (
    FROM_THE_START,
    MASTER,
    STEP,
    WEIGHT,
    KeptByParameter,
    as_tensor,
    count_for,
    first_names,
)
from ddl_magics.strategies.pieces import Piece, collect, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddl_magics.strategies.base import Whole
    from ddl_magics.strategies.zero_layout import Home

Counts = dict[str, dict[str, torch.Tensor]]
"""Name of a parameter -> 0-dim parts of its state."""


class KeptInShards(KeptByParameter):
    """`entries`, `gather` and `put` of a model in a DeepSpeed engine, or of one without an engine."""

    engine: Any
    groups: list[dict[str, Any]]
    """The user's own."""
    _homes: dict[int, Home] | None = None
    """Of the last `entries`."""

    @property
    def _zero(self) -> Any:
        """DeepSpeed's optimizer, None where nothing is trained."""
        return self.engine.optimizer if self.engine is not None and self.optimizer is not None else None

    def _find_homes(self) -> dict[int, Home]:
        return zero_layout.homes(self._zero) if self._zero is not None else {}

    def whole_shape(self, tensor: torch.Tensor) -> torch.Size:
        return tensor.ds_shape if zero_shards.is_sharded(tensor) else tensor.shape  # type: ignore[attr-defined]

    def entries(self) -> list[Entry]:
        self._named = first_names(self.module)
        self._homes = self._find_homes()
        return [*self._weights(), *self._masters(), *self._states()]

    def _masters(self) -> Iterator[Entry]:
        """Of parameters that have one in another precision than the weight's; one in the same is the weight."""
        for name, tensor, home in self._trained():
            master = zero_library.masters(self._zero)[home.number]
            if master.dtype != tensor.dtype:
                yield Entry(name, MASTER, tuple(self.whole_shape(tensor)), master.dtype)

    def _states(self) -> Iterator[Entry]:
        for name, tensor, home in self._trained():
            master, state = self._state_at(home)
            for key, part in state.items():
                if part is not None:
                    value = as_tensor(part, self._zero.optimizer, key)
                    shape = self.whole_shape(tensor) if value.shape == master.shape else value.shape
                    yield Entry(name, key, tuple(shape), value.dtype)

    def _trained(self) -> Iterator[tuple[str, torch.Tensor, Home]]:
        assert self._named is not None
        assert self._homes is not None
        for name, tensor in self._named.items():
            if id(tensor) in self._homes:
                yield name, tensor, self._homes[id(tensor)]

    def _state_at(self, home: Home) -> tuple[torch.Tensor, dict[str, Any]]:
        """The flat tensor that the inner optimizer updates, and its state."""
        master = zero_library.masters(self._zero)[home.number]
        return master, self._zero.optimizer.state.get(master, {})

    def gather(self, entry: Entry, to: int) -> torch.Tensor | None:
        assert self._named is not None, "entries come first"
        assert self._homes is not None
        tensor: Any = self._named[entry.name]
        if entry.kind == WEIGHT:
            if not zero_shards.is_sharded(tensor):
                return self.join(tensor, tensor.detach(), to)
            pieces, mine = zero_layout.shards(tensor)
            return self._collect(pieces, tensor.ds_tensor.view(-1)[: mine.stop - mine.start], entry, to)
        home = self._homes[id(tensor)]
        master, state = self._state_at(home)
        if entry.kind == MASTER:
            return self._collect(home.pieces, home.part(master), entry, to)
        value = as_tensor(state[entry.kind], self._zero.optimizer, entry.kind)
        if value.shape == master.shape:
            return self._collect(home.pieces, home.part(value), entry, to)
        return value.detach().to("cpu", copy=True) if self.strategy.world.rank == to else None

    def _collect(self, pieces: tuple[Piece, ...], mine: torch.Tensor, entry: Entry, to: int) -> torch.Tensor | None:
        world, numel = self.strategy.world, torch.Size(entry.shape).numel()
        whole = collect(pieces, mine, numel=numel, rank=world.rank, to=to, device=world.device)
        return whole.view(entry.shape) if whole is not None else None

    @torch.no_grad()
    def put(self, items: Iterable[tuple[Entry, Whole]]) -> tuple[str, ...]:
        named, homes = first_names(self.module), self._find_homes()
        counts: dict[int, Counts] = {}
        for entry, whole in items:
            tensor = named[entry.name]
            home = homes.get(id(tensor))
            if entry.kind == WEIGHT:
                self._put_weight(tensor, home, whole)
            elif entry.kind == MASTER:
                self._put_master(tensor, home, whole)
            elif home is None:
                continue  # this optimizer does not hold it
            elif entry.shape:
                self._put_part(home, entry, whole)
            else:
                counts.setdefault(home.number, {}).setdefault(entry.name, {})[entry.kind] = whole[...]
        told = [self._put_counts(number, by_name) for number, by_name in sorted(counts.items())]
        if self._zero is not None:
            zero_library.link_states(self._zero)
        self.looks.at("put", self.measure)
        return tuple(dict.fromkeys(note for note in told if note))

    def _put_weight(self, tensor: Any, home: Home | None, whole: Whole) -> None:
        """Into the model, and into the master, which would overwrite it in the next step."""
        if not zero_shards.is_sharded(tensor):
            value = whole[...]
            tensor.copy_(value)
            if home is not None:
                part = home.part(zero_library.masters(self._zero)[home.number])
                part.copy_(value.reshape(-1)[home.mine.start : home.mine.stop])
            return
        _, mine = zero_layout.shards(tensor)
        piece = read(whole, mine.start, mine.stop)
        tensor.ds_tensor.view(-1)[: piece.numel()].copy_(piece)
        if zero_shards.is_whole_now(tensor):  # small ones stay so
            tensor.copy_(whole[...])
        if home is not None:
            home.part(zero_library.masters(self._zero)[home.number]).copy_(piece)

    def _put_master(self, tensor: torch.Tensor, home: Home | None, whole: Whole) -> None:
        master = zero_library.masters(self._zero)[home.number] if home is not None else None
        if home is None or master is None or master.dtype == tensor.dtype:
            self._put_weight(tensor, home, whole)  # the same weight, and more exact where this one is fp32
        else:
            home.part(master).copy_(read(whole, home.mine.start, home.mine.stop))

    def _put_part(self, home: Home, entry: Entry, whole: Whole) -> None:
        master = zero_library.masters(self._zero)[home.number]
        state = self._zero.optimizer.state[master]
        if entry.kind not in state:
            dtype = master.dtype if entry.dtype.is_floating_point else entry.dtype
            state[entry.kind] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
        home.part(state[entry.kind]).copy_(read(whole, home.mine.start, home.mine.stop))

    def _put_counts(self, number: int, by_name: Counts) -> str:
        """One of each count for a flat tensor: those of the parameter that is furthest; says so where others differ."""
        steps = {name: float(parts.get(STEP, torch.zeros(()))) for name, parts in by_name.items()}
        furthest = max(steps, key=lambda name: steps[name])
        master = zero_library.masters(self._zero)[number]
        state = self._zero.optimizer.state[master]
        for key, value in by_name[furthest].items():
            state[key] = count_for(master, self.groups[zero_layout.group_of(self._zero, number)], key, value)
        behind = sum(step != steps[furthest] for step in steps.values())
        if not behind:
            return ""
        return (
            f"{self.strategy.spec.text} counts the steps of a group of parameters together: {behind} that were updated "
            f"less often than the others are now at step {steps[furthest]:.0f} like them."
        )

    def resume_at(self, steps: int) -> None:
        self.updates.count_on(steps)
        if self.engine is not None:
            zero_library.count_on(self.engine, steps)
        if self._zero is not None and type(self.optimizer).__name__ not in FROM_THE_START:
            self._zero.optimizer.state.clear()
            zero_library.unlink_states(self._zero)
