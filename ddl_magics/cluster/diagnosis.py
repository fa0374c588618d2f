"""Why a start failed: known sentences of launchers and engines, each with its remedy."""

from __future__ import annotations

import re

KNOWN = (
    (
        r"run.*as root",
        "the MPI launcher refuses to run as root",
        "Set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 before Jupyter is started",
    ),
    (
        r"not enough slots|oversubscribe",
        "the MPI launcher has fewer slots than ranks",
        "Start fewer ranks with -n, or set PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe",
    ),
    (
        r"Unable to create step",
        "the scheduler has no room for a step in this allocation",
        "Start fewer ranks, or end the other steps of the job",
    ),
    (
        r"connection file never arrived",
        "the ranks did not find the controller's connection file",
        "Jupyter's runtime folder must be on a file system that the ranks see: set JUPYTER_RUNTIME_DIR",
    ),
    (
        r"Registration timed out",
        "the ranks could not reach the controller",
        "Check that this host's name resolves to an address that the ranks reach, or raise --timeout",
    ),
    (
        r"No module named '?ddl_magics",
        "the ranks run a Python without ddl_magics",
        "Install it in the environment of the kernel",
    ),
    (
        r"No such file or directory|not found",
        "the launcher did not find a program",
        "See the launcher's own words above",
    ),
)
"""(what the text contains, what it means, what to do)."""


def explain(output: str) -> tuple[str, str]:
    """Cause and remedy by what was printed; a general pair where nothing is known."""
    for pattern, cause, remedy in KNOWN:
        if re.search(pattern, output, re.IGNORECASE):
            return cause, remedy
    return "the ranks did not come up", "See the launcher's own words above; `%ddl start --timeout S` waits longer"


def last_lines(output: str, count: int = 12) -> str:
    """The end of what a process printed, without blank lines and engines' routine log."""
    lines = [
        line for line in output.splitlines() if line.strip() and not re.search(r"\[I \d|\.\d+ INFO|- INFO -", line)
    ]
    return "\n".join(lines[-count:])
