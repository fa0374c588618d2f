"""Whether the ranks meet in the same collectives, in the same order; if not, one line on each that some ranks miss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddl_magics.views.ranges import in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddl_magics.foresight.walk import Item

MOST = 5
"""Warnings for one cell; more would say the same of its later lines."""

Ways = dict[int, "list[Item]"]
"""Rank -> the collectives that it enters, in order."""
Warnings = dict[int, str]
"""Line of the cell -> what is said of it."""


def misses(ways: Ways) -> Warnings:
    """Lines where a collective is not entered by all."""
    found: Warnings = {}
    for ranks in _groups(ways):
        within = _within(ways, ranks)
        while len(found) < MOST and (apart := _first_difference(within)):
            if ranks and not any(item.guards for item in apart if item):
                break  # what has led here is not known
            line, text = _blame(apart)
            found.setdefault(line, text)
            dropped = {item.line for item in apart if item and item.line == line}
            within = {rank: [item for item in way if item.line not in dropped] for rank, way in within.items()}
    return found | _alone_in_a_group(ways)


def _groups(ways: Ways) -> list[tuple[int, ...] | None]:
    """All ranks, as None, and the ranks of each known group."""
    known = {item.group.ranks: None for way in ways.values() for item in way if item.group and item.group.ranks}
    return [None, *known]


def _within(ways: Ways, ranks: tuple[int, ...] | None) -> Ways:
    """What the ranks of a group enter in it; nothing where a part of that is a guess."""
    if ranks is None:
        return {rank: [item for item in way if not item.group] for rank, way in ways.items()}
    members = {rank: way for rank, way in ways.items() if rank in ranks}
    vague = any(item.group and not item.group.ranks for way in members.values() for item in way)
    within = {rank: [item for item in way if item.group and item.group.ranks == ranks] for rank, way in members.items()}
    guessed = any(guard.guessed for way in within.values() for item in way for guard in item.guards)
    return {} if vague or guessed else within


def _first_difference(ways: Ways) -> list[Item | None]:
    """What the ranks enter where they first differ, None where one enters nothing any more; empty if they agree."""
    for number in range(max(map(len, ways.values()), default=0)):
        here = [way[number] if number < len(way) else None for way in ways.values()]
        if len({(item.key, item.marks) if item else None for item in here}) > 1:
            return here
    return []


def _blame(apart: Sequence[Item | None]) -> tuple[int, str]:
    present = sorted((item for item in apart if item), key=lambda item: item.line)
    item = next((item for item in present if item.guards), present[0])
    across = [other for other in present if other.key != item.key and _of_one_condition(item, other)]
    if across:
        other = across[0]
        return item.line, (f"{item.text} where {item.guards[-1].words} meets {other.text} of line {other.line} "
                           "on the other ranks; they would wait for each other for ever")  # fmt: skip
    if not item.guards:
        return item.line, f"{item.text} is not reached by every rank; the ranks in it would wait there for ever"
    guard = item.guards[-1]
    if guard.loop:
        return item.line, (f"{item.text} is repeated over {guard.words}, which differs between the ranks; "
                           "those with more of it would wait there for ever")  # fmt: skip
    return (
        item.line,
        f"{item.text} is reached only where {guard.words}, and would wait there for the other ranks for ever",
    )


def _of_one_condition(one: Item, other: Item) -> bool:
    """Whether two collectives stand in the branches of the same condition."""
    return bool(one.guards and other.guards and one.guards[-1].test and one.guards[-1].test == other.guards[-1].test)


def _alone_in_a_group(ways: Ways) -> Warnings:
    """A collective of a named group belongs under a condition on its ranks, but not on one rank alone."""
    found: Warnings = {}
    for rank, way in ways.items():
        elsewhere = {item.key for other, items in ways.items() if other != rank for item in items}
        for item in way:
            if item.group and item.guards and item.guards[-1].one and item.key not in elsewhere:
                ranks = item.group.ranks or ()
                if not item.group.foreign and (rank not in ranks or len(ranks) == 1):
                    continue
                found[item.line] = _blame([item, None])[1]
    return found


def left_out(ways: Ways, missing: Sequence[int], typed: str) -> Warnings:
    """The first collective of a cell that `--ranks` keeps from some of the ranks."""
    for rank, way in ways.items():
        for item in way:
            needed = item.group.ranks or () if item.group else missing
            absent = [each for each in missing if each in needed]
            if absent and (item.group is None or rank in needed):
                who = in_words(needed) if item.group else "every rank"
                return {item.line: f"{item.text} needs {who}, and --ranks {typed} leaves out {in_words(absent)}; "
                                   "it would wait there for ever"}  # fmt: skip
    return {}
