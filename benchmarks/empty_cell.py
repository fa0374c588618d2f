"""How long an empty cell takes on all ranks, from request to end: ours, `%%px`, and `DirectView.execute`."""

from __future__ import annotations

from benchmarks.measure import Row, close, ddl, in_turn, main, plain

WARM_UP = 3


def measure(quick: bool) -> list[Row]:
    """Milliseconds at 2, 4 and 8 ranks."""
    rows = []
    for ranks in (2,) if quick else (2, 4, 8):
        ours, theirs = ddl(ranks), plain(ranks)
        sides = [
            lambda book=ours: book.run("%%ddl\npass").seconds * 1e3,
            lambda book=theirs: book.run("%%px\npass").seconds * 1e3,
            lambda book=theirs: book.run("rc[:].execute('pass', block=True);").seconds * 1e3,
        ]
        in_turn(WARM_UP, *sides)
        cell, px, execute = in_turn(5 if quick else 25, *sides)
        rows.append(Row(f"empty cell, {ranks} ranks", "%%px", cell, px, "ms", aim=1.0))
        rows.append(Row(f"empty cell, {ranks} ranks", "DirectView.execute", cell, execute, "ms"))
        close(ours)
        close(theirs)
    return rows


if __name__ == "__main__":
    main(measure, __doc__ or "")
