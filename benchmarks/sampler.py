"""What the sampler costs: the median training step with a record each second, against none until the cell ends."""

from __future__ import annotations

from benchmarks.measure import Row, close, ddl, in_turn, main
from benchmarks.training import body, told

NEVER = 1e9
"""Seconds between two records when it is off."""


def measure(quick: bool) -> list[Row]:
    """Milliseconds a step on 2 ranks."""
    notebook = ddl(2)
    period = notebook.run(
        "%%ddl --output rank0\nfrom ddl_magics.rank import sampler\nprint('period', sampler.PERIOD, '')"
    )
    usual = told(period.stdout, "period")

    def step(seconds: float) -> float:
        notebook.run(f"%%ddl\nfrom ddl_magics.rank import sampler\nsampler.PERIOD = {seconds}")
        return told(notebook.run(f"%%ddl --no-panel\n{body()}").stdout, "median step")

    medians = in_turn(2 if quick else 9, lambda: step(usual), lambda: step(NEVER))
    close(notebook)
    return [Row(f"training step, a record each {usual:g} s", "sampler off", *medians, "ms", aim=1.01)]


if __name__ == "__main__":
    main(measure, __doc__ or "")
