"""Training speed in a `%%ddl` cell with the panel on, against the same lines in a script under torchrun."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import Row, cell_of, close, ddl, in_turn, main, torchrun

SCRIPT = Path(__file__).with_name("training_script.py")


def body() -> str:
    """The lines that are also a cell."""
    return cell_of(SCRIPT)


def told(printed: str, what: str) -> float:
    """The number that rank 0 printed after these words."""
    return float(printed.partition(what)[2].split()[0])


def measure(quick: bool) -> list[Row]:
    """Tokens a second of 2 ranks, data-parallel."""
    notebook = ddl(2)
    medians = in_turn(
        2 if quick else 7,
        lambda: told(notebook.run(f"%%ddl --strategy ddp\n{body()}").stdout, "tokens a second"),
        lambda: told(torchrun(SCRIPT, 2), "tokens a second"),
    )
    close(notebook)
    row = Row("training in a cell with the panel", "torchrun", *medians, "tokens/s", aim=0.98, higher_is_better=True)
    return [row]


if __name__ == "__main__":
    main(measure, __doc__ or "")
