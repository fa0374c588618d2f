"""A flood of output: 4 ranks print 100,000 lines each, in a `%%ddl` cell and in `%%px`.

Counted at the front end: seconds until the cell ends, and bytes of the messages that the kernel published. `%%px`
publishes its whole text again with each chunk; ours shows head and tail and keeps the rest for `%ddl log`.
"""

from __future__ import annotations

import statistics

from benchmarks.measure import Row, close, ddl, in_turn, main, plain

FLOOD = "import os\nfor i in range({lines}):\n    print('rank', os.getpid(), 'line', i)"


def measure(quick: bool) -> list[Row]:
    """Seconds, and bytes published for each byte printed."""
    ranks, lines = (2, 2_000) if quick else (4, 100_000)
    ours, theirs = ddl(ranks), plain(ranks)
    flood = FLOOD.format(lines=lines)
    printed = ranks * sum(len(f"rank 12345 line {i}\n") for i in range(lines))
    bytes_of: dict[str, list[float]] = {"%%ddl": [], "%%px": []}

    def run(magic: str) -> float:
        notebook = ours if magic == "%%ddl" else theirs
        seconds = notebook.run(f"{magic}\n{flood}").seconds
        bytes_of[magic].append(notebook.published / printed)
        return seconds

    medians = in_turn(2 if quick else 5, lambda: run("%%ddl"), lambda: run("%%px"))
    share = {magic: statistics.median(values) for magic, values in bytes_of.items()}
    close(ours)
    close(theirs)
    what = f"{ranks} ranks x {lines:,} lines"
    return [
        Row(what, "%%px", *medians, "s", aim=1.0),
        Row(f"bytes published per byte printed, {what}", "1 byte", share["%%ddl"], 1.0, "bytes", aim=1.5),
        Row(f"bytes published per byte printed, {what}", "%%px", share["%%ddl"], share["%%px"], "bytes"),
    ]


if __name__ == "__main__":
    main(measure, __doc__ or "")
