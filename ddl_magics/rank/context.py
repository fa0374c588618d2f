"""What a cell talks to: `ddl`, the same object on every rank and for the life of the rank.

It hands every call to the one place that does it: `scope` (the cell and its strategy), `training` (accumulation),
`data` (loaders), `progress` (loops). Calls between ranks are in `among`, those for checkpoints in `keeping`. It also
works in a plain program under torchrun, srun or mpiexec, see `init`. Limits: one thread, the main one, calls it; only
`memory`, `peak_memory` and `recorder` are the sampler's too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank import compiled, data, parts, together
from ddl_magics.rank.batches import Share, own_randomness, seed_all
from ddl_magics.rank.keeping import Keeping
from ddl_magics.rank.model import training_of
from ddl_magics.rank.progress import Tracker
from ddl_magics.rank.speaking import Speaking
from ddl_magics.rank.training import Training
from ddl_magics.strategies import base
from ddl_magics.strategies.recompute import Recomputation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.utils.data import DataLoader

    from ddl_magics.rank.program import Program
    from ddl_magics.strategies.base import Strategy


class Context(Keeping, Speaking):
    """The context `ddl` of one rank; see `Scope` for its parameters."""

    # Models

    @contextlib.contextmanager
    def model_init(self, seed: int | None = None) -> Iterator[None]:
        """Within it, modules get the weights that one process would draw from `seed`, under every strategy.

        `seed` None is the cell's, or 0. The rank's own random state is as before, afterwards.
        """
        strategy = self._strategy()
        with own_randomness():
            seed_all(self._seed if seed is None else seed)
            with strategy.model_init():
                yield

    def prepare(
        self,
        *objects: Any,
        accumulate: int = 1,
        batch: str = "global",
        precision: str | None = None,
        checkpoint_activations: bool | None = None,
    ) -> Any:
        """Put models, optimizers, loaders and schedules under this cell's strategy.

        Parameters
        ----------
        objects
            At most one model and one optimizer over its parameters, loaders, learning-rate schedulers.
        accumulate
            Batches for each optimizer step.
        batch
            What a loader's batch size counts: `global` the samples of all ranks together, `per-rank` those of one.
        precision
            `32`, `bf16-mixed` or `bf16-true`; None is the cell's.
        checkpoint_activations
            Keep only the inputs of the model's blocks, and compute the rest again in the backward; None is the cell's.

        Returns
        -------
        The same kinds in the same order; a single object alone. What was given must not be used any more.
        """
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise UsageOnRankError(f"accumulate={accumulate!r} cannot be", "Give a whole number of batches, 1 or more.")
        precision = self._request.precision if precision is None else precision
        self.hardware.require(precision)
        if checkpoint_activations is None:
            checkpoint_activations = self._request.checkpoint_activations
        given = parts.sort(objects)
        strategy = self._strategy()
        made: dict[int, Any] = {}
        for loader in given.loaders:
            made[id(loader)] = self._split(loader, strategy, batch)
        if given.model is not None:
            loaders = [made[id(loader)] for loader in given.loaders]
            wanted = base.Training(precision, accumulate, checkpoint_activations)
            made |= self._prepare_model(given, strategy, loaders, wanted)
        result = tuple(made.get(id(thing), thing) for thing in objects)
        return result if len(result) > 1 else result[0]

    def _split(self, loader: DataLoader[Any], strategy: Strategy, batch: str) -> data.RankLoader:
        rank, size = strategy.data_rank, strategy.data_size
        return data.split(loader, rank=rank, size=size, seed=self._seed, batch=batch, note=self.note)

    def _prepare_model(
        self, given: parts.Parts, strategy: Strategy, loaders: list[data.RankLoader], wanted: base.Training
    ) -> dict[int, Any]:
        assert given.model is not None
        module = compiled.in_place(given.model)
        if strategy.not_compiled and compiled.leave_out(module):
            self.note(f"{strategy.spec.text} does not compile this {type(module).__name__}: {strategy.not_compiled}.")
        with contextlib.ExitStack() as on_failure:
            recomputation = None
            if wanted.checkpoint_activations:
                recomputation = Recomputation(module)
                on_failure.callback(recomputation.undo)
            names = parts.group_names(module, given.optimizer)
            prepared = strategy.prepare(module, given.optimizer, wanted)
            on_failure.pop_all()
        for text in (*prepared.notes, *(recomputation.notes() if recomputation is not None else ())):
            self.note(text)
        for schedule in given.schedulers:
            if not parts.steps_by_itself(schedule):
                self.note(f"{type(schedule).__name__} wants a metric: call its step(metric) yourself.")
        training = Training(
            prepared,
            schedules=given.schedulers,
            loaders=loaders,
            group_names=names,
            accumulate=wanted.accumulate,
            cell=self._request.cell,
            autocast=lambda: self.hardware.autocast(wanted.precision),
            recomputation=recomputation,
        )
        model = self._models.wrap(training)
        self._memory.add(training)
        return {id(given.model): model, id(given.optimizer): prepared.optimizer}

    def unwrap(self, model: Any) -> torch.nn.Module:
        """Return the plain module of a prepared model; under some strategies its parameters are sharded."""
        training = training_of(model)
        return model if training is None else training.prepared.module

    def forget_dropped_models(self) -> None:
        """Free models whose last name is gone but which a cycle of references still holds."""
        self._models.collect()

    # Training

    def track(
        self, loader: Iterable[Any], epochs: int = 1, total: int | None = None, steps: int | None = None
    ) -> Iterator[Any]:
        """Yield the batches of a loader, or of any iterable, on the device, and show how far and how fast it is.

        Parameters
        ----------
        loader
            Batches; its length is read where it has one.
        epochs
            How often to go through them.
        total
            Steps to show where the loader has no length; it ends nothing.
        steps
            Optimizer steps after which the loop ends, also in the middle of an epoch, as after the cell's `--steps`.
        """
        trained = [t for t in self._models.live() if any(loader is own for own in t.loaders)]
        limit = self._steps.loop(loader, steps, trained[0] if trained else None, self._models.prepared)
        if limit is not None and limit.reached:  # an earlier loop of the cell made all its steps
            return
        tracker = Tracker(loader, epochs, total, self.device, limit)
        if tracker.passed:
            self.note(f"{tracker.passed} of {epochs} epochs were trained before the checkpoint, and are passed over.")
        outer, self._tracker = self._tracker, tracker
        try:
            yield from tracker.run(self.recorder)
        finally:
            if limit is not None and limit.cell_reached:
                self._steps.loop_is_over(loader, self._models.prepared)
            if self._tracker is tracker:
                self._tracker = outer

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, model: Any = None) -> None:
        """Backward of this rank's loss, so that gradients become those of the mean over the global batch.

        Parameters
        ----------
        loss
            0-dim: the mean over this rank's part of the batch.
        weight
            How much that mean counts, such as the tokens it is over; without it the samples do. Costs one all_reduce
            of one number. It weighs the ranks of one batch; accumulated batches count alike.
        model
            Whose loss, where several models are trained.
        """
        training = self._training(model, "backward")
        loss = _checked(loss)
        share = self._share(training)
        factor, counted = self._weights(share, weight)
        name, step = self._next_loss(training)
        self.recorder.record(name, step, loss, counted)
        self._memory.notice()  # all activations are there now
        training.backward(loss, factor, share)

    def step(self, max_norm: float | None = None, model: Any = None) -> float | torch.Tensor | None:
        """Clip, optimizer step, schedule step, zero_grad, on every k-th call and on the last batch of an epoch.

        Returns the norm of the gradient before clipping on calls that act, where it is known; None on the others.
        """
        training = self._training(model, "step")
        if training.prepared.optimizer is None:
            raise UsageOnRankError(f"{training.name} was prepared without an optimizer", "Give prepare both.")
        acts = training.at_boundary()
        if acts:
            self._memory.notice()  # gradients are all there now, and are gone after
        norm = training.step(max_norm)
        if acts:
            self._note_step(training, norm if max_norm is not None else None)
        return norm

    def log(self, **scalars: float | torch.Tensor) -> None:
        """Put numbers of this rank on the panel beside the loss, at the present step.

        In a cell that neither tracks a loop nor calls `backward`, each call is a step.
        """
        for name, value in scalars.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise UsageOnRankError(
                    f"log({name}=...) takes one number, got {tuple(value.shape)}", "Reduce it first."
                )
            if not isinstance(value, torch.Tensor) and not hasattr(value, "__float__"):
                raise UsageOnRankError(f"log({name}=...) takes one number, got {value!r}", "Print what is none.")
        for name, value in scalars.items():
            step = self._step or self._logged.get(name, 0) + 1
            self._logged[name] = step
            self.recorder.record(name, step, value)

    def _training(self, model: Any, call: str) -> Training:
        return self._models.meant(model, call, self._request.cell)

    def _share(self, training: Training) -> Share | None:
        """Of the batch that this loss is of."""
        share = training.share()
        return share if share is not None or self._tracker is None else self._tracker.share

    def _weights(
        self, share: Share | None, weight: float | torch.Tensor | None
    ) -> tuple[float | torch.Tensor, float | torch.Tensor]:
        """What to multiply the loss by, and how much it counts in the mean that is shown."""
        if weight is None:
            if share is None or share.samples is None:
                return 1.0, 1.0
            return share.weight, float(share.samples)
        if share is not None and share.samples == 0:
            weight = weight * 0  # what it counts are tokens of a sample that another rank has
        return together.weight_in_mean(weight, self.device), weight

    def _next_loss(self, training: Training) -> tuple[str, int]:
        name, step = self._loss_of(training)
        self._losses[training] = (name, step + 1)
        self._step = max(self._step, step + 1)
        return name, step + 1

    def _note_step(self, training: Training, norm: float | torch.Tensor | None) -> None:
        if self._tracker is not None and self._tracker.limit is not None:
            self._tracker.limit.count(training)
        if norm is not None:
            name, step = self._losses.get(training, ("loss", self._step))
            self.recorder.record(name.replace("loss", "grad norm"), step, norm)

    # Memory

    def memory(self) -> dict[str, int]:
        """Bytes of this rank now, by kind, with `total` and `capacity`; from any thread."""
        return self._memory.now()

    def peak_memory(self) -> dict[str, int]:
        """Bytes of this rank at the peak of the present cell, by kind, with `total`; from any thread."""
        return self._memory.peak()


def init(strategy: str | None = None, **options: Any) -> Program:
    """Give the context in a plain program, see `rank.program.init`."""
    from ddl_magics.rank import program

    return program.init(strategy, **options)


def _checked(loss: Any) -> torch.Tensor:
    """Return the loss as a 0-dim tensor; UsageOnRankError with the remedy where it is none."""
    if not isinstance(loss, torch.Tensor):
        remedy = "Write ddl.backward(output.loss)." if hasattr(loss, "loss") else "Give the tensor of the loss."
        raise UsageOnRankError(f"backward was given a {type(loss).__name__}", remedy)
    if loss.numel() != 1:
        raise UsageOnRankError(f"backward was given a loss of shape {tuple(loss.shape)}", "Take its mean first.")
    if not loss.requires_grad:
        raise UsageOnRankError("The loss has no graph to go backward through", "Compute it outside torch.no_grad().")
    return loss.reshape(())
