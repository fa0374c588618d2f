"""A cluster as another process of the same user sees it: by its folder alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddl_magics.cluster.cluster import STOP_S
from ddl_magics.cluster.ipp import RankClient
from ddl_magics.cluster.processes import end, terminate

if TYPE_CHECKING:
    from ddl_magics.cluster.folder import ClusterFolder


def ask(folder: ClusterFolder, op: str, patience: float) -> dict[int, dict[str, Any]]:
    """Answers by rank to a request such as `state`, of those that answer in time, also while a cell runs."""
    client = RankClient(folder.client_file)
    try:
        client.engine_of = {rank["rank"]: rank["engine"] for rank in folder.read_card().ranks}
        return client.answers(op, list(client.engine_of), patience)
    finally:
        client.close(linger=0)


def stop(folder: ClusterFolder) -> list[int]:
    """End every process of a cluster, the ranks first; return the numbers of those that had to be killed."""
    card = folder.read_card()
    folder.mark_stopped()
    killed = []
    for processes in (card.processes, card.controller):
        for process in processes:
            terminate(process)
        killed += end(set(processes), STOP_S)
    folder.remove()
    return killed
