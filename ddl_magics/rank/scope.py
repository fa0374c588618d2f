"""What the present cell asked for, on one rank: its place, strategy, precision and seed.

Strategies are kept, one for each spec, from the first cell that names them; where the process group was made anew they
and the prepared models go over to the new one. They are made when a cell first needs one: code that only uses raw
`torch.distributed` pays for none.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddl_magics.protocol import CellRequest, World
from ddl_magics.rank import group
from ddl_magics.rank.batches import seed_all
from ddl_magics.rank.device import Device
from ddl_magics.rank.environment import local_rank
from ddl_magics.rank.measure import Memory
from ddl_magics.rank.rebinding import Rebinding
from ddl_magics.rank.recorder import Recorder
from ddl_magics.rank.registry import Models
from ddl_magics.rank.steps import Steps
from ddl_magics.strategies import spec

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ddl_magics.rank.progress import Tracker
    from ddl_magics.rank.training import Training
    from ddl_magics.strategies.base import Strategy


def _present_group() -> Callable[[], Any]:
    """Give the default group, none too, as a weak reference: a group that is held keeps its threads and connections."""
    world = dist.group.WORLD
    return (lambda: None) if world is None else weakref.ref(world)


class Scope:
    """One rank in one cell.

    Parameters
    ----------
    world
        This rank's place; its process group is open.
    say
        Gets each new sentence for the user at once; those of a cell travel with the recorder.
    """

    def __init__(self, world: World, say: Callable[[str], object] | None = None) -> None:
        self.world = world
        self.hardware = Device.of(world.device)
        self.recorder = Recorder(self.hardware)
        self._say = say
        self._memory = Memory(self.hardware)
        self._models = Models()
        self._strategies: dict[str, Strategy] = {}
        self._bound_to: Callable[[], Any] | None = _present_group()
        """The default group that models and strategies use; None where taking it over broke off."""
        self._tracker: Tracker | None = None
        self._start(CellRequest(code="", cell=0, run="", name=""))
        group.notes_to(self.note)

    # Where this rank is

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""
        return 0 if self._alone else self.world.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return 1 if self._alone else self.world.world_size

    @property
    def local_rank(self) -> int:
        """Index of this rank's GPU on its node; without GPUs, its place among the ranks of the node."""
        return 0 if self._alone and self.world.device == "cpu" else local_rank(self.world)

    @property
    def local_world_size(self) -> int:
        """How many ranks this node has."""
        return 1 if self._alone else self.world.local_world_size

    @property
    def node_rank(self) -> int:
        """Number of this node, from 0."""
        return 0 if self._alone else self.world.node_rank

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.hardware.torch

    @property
    def strategy(self) -> str:
        """The strategy of this cell, as one writes it."""
        return self._request.strategy

    # A cell's life

    def begin_cell(self, request: CellRequest) -> None:
        """Take on a cell's strategy, precision and seed.

        Raises
        ------
        DDLError
            The strategy cannot run here, or some ranks lost their process group and others did not.
        """
        checked = spec.check(spec.parse(request.strategy), self.world.world_size, self.world.local_world_size)
        self.hardware.require(request.precision)
        if checked.name != "single":  # a cell of rank 0 alone needs no group, and no other rank comes
            self._mend_group(request)
        self._start(request)
        self._strategy_text = checked.text
        self.hardware.activate()
        self._memory.begin()
        if request.seed is not None:
            seed_all(request.seed)

    def end_cell(self) -> None:
        """Let go of what belongs to the cell; models stay."""
        self._tracker = None
        self._memory.notice()

    def note(self, text: str) -> None:
        """Leave a sentence for the user, said once in a run."""
        if self.recorder.note(text) and self._say is not None:
            self._say(text)

    def _start(self, request: CellRequest) -> None:
        self._request = request
        self._strategy_text = request.strategy
        self._alone = request.strategy.partition(",")[0] == "single"
        self._tracker = None
        self._firsts = 0
        self._losses: weakref.WeakKeyDictionary[Training, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._step = 0
        self._steps = Steps(request.steps)
        for training in self._models.live():
            training.used = False
        self._logged: dict[str, int] = {}

    def _loss_of(self, training: Training) -> tuple[str, int]:
        """Name of a model's curve in this cell, and its latest step."""
        known = len(self._losses)
        return self._losses.get(training, ("loss" if known == 0 else f"loss {known + 1}", 0))

    def _strategy(self) -> Strategy:
        text = self._strategy_text
        if text not in self._strategies:
            self._strategies[text] = spec.load(spec.parse(text), self.world)
        return self._strategies[text]

    @property
    def _seed(self) -> int:
        return self._request.seed or 0

    def prepared_models(self) -> list[Training]:
        """What stands behind each prepared model that lives."""
        return self._models.live()

    # The process group's life

    def _mend_group(self, request: CellRequest) -> None:
        """Make the group again where a cell destroyed it, and go on with models and strategies over a new group."""
        if not group.is_open():
            group.reopen_where_all_lost_it(f"{request.run}/{request.part}")
        elif self._bound_to is None:
            group.reopen_group()
        if self._bound_to is not None and self._bound_to() is dist.group.WORLD:
            return
        for name, why in self.recover()["closed"].items():
            self.note(f"{name} was closed: {why}.")

    def unsettled(self) -> bool:
        """Whether a model is in the middle of a step, which no later cell can go on with when the present one failed.

        Gradients of the failed step would count again when it is made again, and libraries wait for the rest of a
        backward that broke off. `recover` puts an end to that, also where the group is sound.
        """
        return any(training.unsettled for training in self._models.live() if not training.closed)

    def recover(self) -> dict[str, Any]:
        """Let strategies and prepared models go on over the process group that was made anew; a collective.

        Returns
        -------
        `models`: optimizer steps of this rank by the name of each model that goes on; ranks whose numbers differ are
        out of step, and one without it stands by while another trains it alone. `torn`: names of those an update of
        which broke off in its middle on this rank. `closed`: why, by name, for models that cannot go on on some rank,
        and so on none.
        """
        sound = self._bound_to is not None and self._bound_to() is dist.group.WORLD
        self._bound_to = None
        rebinding = Rebinding(self._models, self._strategies, self._close, new_group=not sound)
        rebinding.run()
        self._bound_to = _present_group()
        group.notes_to(self.note)
        return rebinding.told()

    def _close_all(self) -> None:
        for training in self._models.live():
            self._close(training)
        strategies, self._strategies = self._strategies, {}
        for strategy in strategies.values():
            self._close(strategy)

    def _close(self, thing: Training | Strategy, *why: str) -> None:
        try:
            thing.close(*why)
        except Exception as error:  # noqa: BLE001 - what it would free went with its process group, or broke off
            self.note(f"{type(thing).__name__} could not be closed cleanly: {error}")

    def close(self) -> None:
        """Let go of models, strategies and the process group."""
        self._close_all()
        group.close_group()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
