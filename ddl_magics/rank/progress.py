"""How far a loop is and how fast: `track` counts batches, tokens and seconds, and puts batches on the device.

Rates are medians over the last 50 steps of this rank, so that one slow step does not bend them.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.protocol import Progress
from ddl_magics.rank.batches import Share
from ddl_magics.rank.data import RankLoader

if TYPE_CHECKING:
    from ddl_magics.rank.recorder import Recorder
    from ddl_magics.rank.steps import Limit

WINDOW = 50
"""Steps that a median is taken over."""
REFRESH = 0.2
"""Seconds between two records of progress: the sampler sends fewer, and a median costs microseconds."""
TOKEN_NAMES = ("input_ids", "tokens", "labels", "decoder_input_ids")
"""Names under which batches carry token numbers."""


class Tracker:
    """One loop over a loader or any iterable; with a `limit` it ends after so many optimizer steps, and shows those."""

    def __init__(
        self, items: Iterable[Any], epochs: int, total: int | None, device: torch.device, limit: Limit | None = None
    ) -> None:
        self.items = items
        self.limit = limit
        self._epochs = epochs
        self.passed = items.bookmark.pass_over(epochs) if isinstance(items, RankLoader) else 0
        """Epochs that were trained before a load."""
        self._device = device
        self._length = _length(items)
        self._batches = None if self._length is None else self._length * epochs
        self._total = self._batches if total is None else total
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._tokens: deque[int] = deque(maxlen=WINDOW)
        self._samples: deque[int] = deque(maxlen=WINDOW)
        self._before = self._done_before()
        self._step = self._before
        self._shown = 0.0
        self.share: Share | None = None
        """Of the present batch, where the iterable is no prepared loader."""

    def run(self, recorder: Recorder) -> Iterator[Any]:
        """Yield the batches of all epochs, on the device."""
        epoch = min(self.passed, max(self._epochs - 1, 0))
        self._report(recorder, epoch)
        before = time.perf_counter()
        try:
            for epoch in range(self.passed, self._epochs):
                for index, batch in enumerate(self.items):
                    self._place(index)
                    self._count(batch)
                    yield to_device(batch, self._device)
                    now = time.perf_counter()
                    self._seconds.append(now - before)  # the wait for the batch is part of its step
                    before = now
                    self._step += 1
                    if self.limit is not None and self.limit.reached:
                        break
                    if now - self._shown > REFRESH:
                        self._report(recorder, epoch)
                if self.limit is not None and self.limit.reached:
                    break
            self._report(recorder, epoch, finished=True)
        finally:
            self.share = None

    def _done_before(self) -> int:
        """Batches of this loop that were done before a load."""
        if not isinstance(self.items, RankLoader):
            return 0
        mark = self.items.bookmark
        begun = mark.done(mark.epoch)[0] if self.passed < self._epochs else 0
        return self.passed * (self._length or 0) + begun

    def _place(self, index: int) -> None:
        if not isinstance(self.items, RankLoader):
            last = self._length is not None and index == self._length - 1
            self.share = Share(index=index, length=self._length, last=last)

    def _count(self, batch: Any) -> None:
        share = self.items.share if isinstance(self.items, RankLoader) else None
        repeated = share is not None and share.samples == 0
        tokens, samples = count(batch)
        self._tokens.append(0 if repeated else tokens)
        self._samples.append(0 if repeated else samples)

    def _report(self, recorder: Recorder, epoch: int, *, finished: bool = False) -> None:
        self._shown = time.perf_counter()
        seconds = statistics.median(self._seconds) if self._seconds else None

        def rate(counts: deque[int]) -> float | None:
            return statistics.median(counts) / seconds if seconds and any(counts) else None

        step, total, batches = self._position()
        recorder.progress(
            Progress(
                step=step,
                total=total,
                epoch=epoch,
                epochs=self._epochs,
                seconds_per_step=seconds * batches if seconds is not None else None,
                tokens_per_second=rate(self._tokens),
                samples_per_second=rate(self._samples),
                finished=finished,
            )
        )

    def _position(self) -> tuple[int, int | None, int]:
        """Step, total, and batches of a step: optimizer steps where those end the loop, else batches."""
        trains = self.limit is not None and (self.limit.made > 0 or self._step - self._before <= self.limit.batches)
        if self.limit is None or not trains:
            return self._step, self._total, 1
        left = None if self._batches is None else self._batches - self._before
        return self.limit.made, self.limit.total(left), self.limit.batches


def _length(items: Iterable[Any]) -> int | None:
    try:
        return len(items)  # type: ignore[arg-type]
    except TypeError:
        return None


def count(batch: Any) -> tuple[int, int]:
    """Tokens (0 where the batch holds none that we know) and samples of a batch.

    Tokens are looked for by name, and in a tuple or bare tensor by kind: whole numbers in two dimensions.
    """
    if isinstance(batch, Mapping):
        named = next((batch[name] for name in TOKEN_NAMES if isinstance(batch.get(name), torch.Tensor)), None)
        if named is not None and named.dim() > 1:
            return named.numel(), named.shape[0]
        first = next((value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), None)
        return 0, first.shape[0] if first is not None else 0
    first = batch
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if not isinstance(first, torch.Tensor) or not first.dim():
        return 0, 0
    whole = not first.is_floating_point() and not first.is_complex() and first.dtype != torch.bool
    return first.numel() if whole and first.dim() == 2 else 0, first.shape[0]


def to_device(batch: Any, device: torch.device) -> Any:
    """Put the tensors of a batch on a device, at any depth of mapping, list, tuple or named tuple."""
    if isinstance(batch, torch.Tensor):
        # From pinned memory the copy runs beside the computing; from other memory this waits as usual.
        return batch.to(device, non_blocking=True)
    if device.type == "cpu":
        return batch
    if isinstance(batch, Mapping) and hasattr(batch, "to"):  # BatchEncoding of transformers
        return batch.to(device)
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
