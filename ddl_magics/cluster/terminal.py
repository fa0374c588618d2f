"""A cluster as another process of the same user sees it: by its folder alone."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

from ddl_magics.cluster.cluster import end
from ddl_magics.cluster.folder import ClusterFolder
from ddl_magics.cluster.ipp import RankClient

ANSWER_S = 2.0


def ask_state(folder: ClusterFolder) -> dict[int, dict[str, Any]]:
    """State by rank, of those that answer, also while a cell runs."""
    client = RankClient(folder.client_file)
    try:
        client.engine_of = {rank["rank"]: rank["engine"] for rank in folder.read_card().ranks}
        return client.answers("state", list(client.engine_of), ANSWER_S)
    finally:
        client.close(linger=0)


def stop(folder: ClusterFolder) -> list[int]:
    """End every process of a cluster, by number and start time; return the numbers of those that were killed."""
    processes = set(folder.read_card().processes)
    for process in processes:
        if process.alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
    killed = end(processes, 5.0)
    folder.remove()
    return killed
