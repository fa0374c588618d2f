"""A cluster as another process of the same user sees it: by its folder alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddl_magics.cluster.cluster import STOP_S, end, terminate
from ddl_magics.cluster.ipp import RankClient

if TYPE_CHECKING:
    from ddl_magics.cluster.folder import ClusterFolder

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
    """End every process of a cluster, the ranks first; return the numbers of those that had to be killed."""
    card = folder.read_card()
    killed = []
    for processes in (card.processes, card.controller):
        for process in processes:
            terminate(process)
        killed += end(set(processes), STOP_S)
    folder.remove()
    return killed
