"""Which ranks hold the same under a name, and where and how far the others differ (`%ddl check`).

Works on what `rank.compare` tells, in its rounds; tensors stay where they are. A rank that holds a shard is compared
with ranks that hold the same shard, and with all of them in what is not sharded. No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ddl_magics.views import format as fmt
from ddl_magics.views.check import Row
from ddl_magics.views.ranges import in_words, ranges

Ask = Callable[[str, dict[int, tuple[Any, ...]]], dict[int, Any]]
"""Calls a function of `rank.compare` on ranks with the arguments given by rank; results by rank."""

ROWS = 8
"""Groups of ranks that one name is shown with."""
PIECES = 4
"""Pieces of a tensor whose numbers are fetched to see how far they differ."""


def check(names: list[str], ranks: list[int], ask: Ask) -> list[Row]:
    """Rows of the table: one a name where all ranks agree, else one for each group of ranks that do."""
    told = ask("survey", dict.fromkeys(ranks, (names,)))
    rows = []
    for index, name in enumerate(names):
        rows += Name(name, {rank: told[rank][index] for rank in ranks}, ask).rows()
    return rows


@dataclass
class Difference:
    """One tensor or value in which a rank differs from another that should hold the same."""

    path: str
    there: dict[str, Any] | None
    """As the other rank has it; None where it has none."""
    here: dict[str, Any] | None
    other: int
    """The other rank."""

    @property
    def kind(self) -> str:
        """What it is counted as."""
        return str((self.here or self.there or {})["kind"])


class Name:
    """One name on all ranks. `surveys`: what each told."""

    def __init__(self, name: str, surveys: dict[int, dict[str, Any]], ask: Ask) -> None:
        self.name = name
        self.surveys = {rank: survey for rank, survey in surveys.items() if "error" not in survey}
        self.failed = {rank: survey for rank, survey in surveys.items() if "error" in survey}
        self._ask = ask

    def rows(self) -> list[Row]:
        """What the table says about the name, the ranks that agree first."""
        found = self._rows_of_values() if self.surveys else []
        for words, ranks in grouped({r: self._failure(s) for r, s in self.failed.items()}):
            found.append(Row(self.name, ranges(ranks), "", words, ok=False))
        return found

    def _failure(self, survey: dict[str, Any]) -> str:
        return "there is no such variable" if survey["missing"] else str(survey["error"])

    def _rows_of_values(self) -> list[Row]:
        agreeing, *others = self.groups()
        what = self._what(agreeing[0])
        if not others:
            return [Row(self.name, ranges(agreeing), what, self._equal(agreeing), ok=not self.failed)]
        told = self._details(agreeing, others)
        rows = [Row(self.name, ranges(agreeing), what, "agree" if agreeing[1:] else "", ok=True)]
        rows += [Row(self.name, ranges(group), self._what(group[0]), self._how(group[0], agreeing, told), ok=False)
                 for group in others[:ROWS]]  # fmt: skip
        if others[ROWS:]:
            left = [rank for group in others[ROWS:] for rank in group]
            rows.append(Row(self.name, ranges(left), "", "differ too", ok=False))
        return rows

    def groups(self) -> list[list[int]]:
        """Ranks that hold what most do, or the lowest rank's where no more do; then the others by what they hold.

        What is whole decides first: of two ranks that differ in the shard that both hold, the one is right that agrees
        with the rest in what all hold.
        """
        whole = most_common([(survey["head"], survey["digests"].get("")) for survey in self.surveys.values()])
        right = [rank for rank, s in self.surveys.items() if (s["head"], s["digests"].get("")) == whole]
        common: dict[str, str] = {}
        for key in {key for rank in right for key in self.surveys[rank]["digests"]}:
            common[key] = most_common(
                [self.surveys[r]["digests"][key] for r in right if key in self.surveys[r]["digests"]]
            )
        agreeing = [rank for rank in right if self.surveys[rank]["digests"].items() <= common.items()]
        rest = {rank: repr((s["head"], s["digests"])) for rank, s in self.surveys.items() if rank not in agreeing}
        found = [ranks for _, ranks in grouped(rest)]
        return [agreeing, *found] if agreeing else found

    def _what(self, rank: int) -> str:
        survey = self.surveys[rank]
        size = f", {fmt.size(survey['nbytes'])}" if survey["leaves"] > 1 and survey["nbytes"] else ""
        text = f" {survey['text']}" if survey["text"] else ""
        return f"{survey['head']}{text}{size}"

    def _equal(self, ranks: list[int]) -> str:
        survey = self.surveys[ranks[0]]
        said = ["equal" if len(self.surveys) > 1 else "on one rank only"]
        if survey["sharded"]:
            part = (
                f"{survey['sharded']} of {fmt.plural(survey['tensors'], 'tensor')} sharded over {self._copies(ranks)}"
            )
            said = [part, "the rest is equal"][: 1 if survey["sharded"] == survey["leaves"] else 2]
        if survey["vague"]:
            said.append(f"{fmt.plural(survey['vague'], 'value')} compared by type alone")
        return "; ".join(said)

    def _copies(self, ranks: list[int]) -> str:
        """`ranks 0-1, and again over 2-3`: ranks that hold one whole together, and those that hold the same shards."""
        seen: Counter[frozenset[str]] = Counter()
        copies: dict[int, list[int]] = {}
        for rank in ranks:
            keys = frozenset(self.surveys[rank]["digests"]) - {""}
            copies.setdefault(seen[keys], []).append(rank)
            seen[keys] += 1
        first, *more = copies.values()
        return f"{in_words(first)}{''.join(f', and again, equal, over {ranges(copy)}' for copy in more)}"

    # Where they differ.

    def _details(self, agreeing: list[int], others: list[list[int]]) -> dict[int, list[dict[str, Any]]]:
        """Leaves of one rank of each group, and of a rank that agrees for each shard."""
        ranks = {group[0] for group in others[:ROWS]} | {agreeing[0]}
        holders: dict[str, int] = {}
        for rank in agreeing:
            for key in self.surveys[rank]["digests"]:
                holders.setdefault(key, rank)
        return self._ask("details", dict.fromkeys(sorted(ranks | set(holders.values())), (self.name,)))

    def _how(self, rank: int, agreeing: list[int], told: dict[int, list[dict[str, Any]]]) -> str:
        differences = self._differences(rank, [other for other in agreeing if other in told], told)
        if not differences:
            return "differs"
        first = differences[0]
        place = self._place(differences, told[rank])
        if not first.path or first.kind == "random state":
            return place + (self._how_far(first, rank) if comparable(first) else "")
        if first.here is None or first.there is None:
            return f"{place}, which is only on {in_words([first.other if first.here is None else rank])}"
        if comparable(first):
            return place + self._how_far(first, rank)
        here, there = (" ".join((leaf["what"], leaf["text"])).strip() for leaf in (first.here, first.there))
        return f"{place}: {here}, on {in_words([first.other])} {there}"

    @staticmethod
    def _place(differences: list[Difference], leaves: list[dict[str, Any]]) -> str:
        if not differences[0].path:
            return "differs"
        counts = []
        for kind in dict.fromkeys(difference.kind for difference in differences):
            some = sum(difference.kind == kind for difference in differences)
            counts.append(f"{some} of {fmt.plural(sum(leaf['kind'] == kind for leaf in leaves), kind or 'value')}")
        paths = [difference.path.removeprefix(".") for difference in differences]
        names = f": {', '.join(paths)}" if differences[0].kind == "random state" else f", first {paths[0]}"
        return f"differs in {', '.join(counts)}{names}"

    @staticmethod
    def _differences(rank: int, others: list[int], told: dict[int, list[dict[str, Any]]]) -> list[Difference]:
        """Leaves of a rank beside those of the first other that holds the same shard, or that leaf at all."""
        by_path = {other: {leaf["path"]: leaf for leaf in told[other]} for other in others}
        here = {leaf["path"]: leaf for leaf in told[rank]}
        found = []
        for path, leaf in here.items():
            same = [o for o in others if path in by_path[o] and by_path[o][path]["key"] == leaf["key"]]
            if same:
                there = by_path[same[0]][path]
                if (there["what"], there["digest"]) != (leaf["what"], leaf["digest"]):
                    found.append(Difference(path, there, leaf, same[0]))
            elif not any(path in by_path[o] for o in others):
                found.append(Difference(path, None, leaf, others[0]))
        found += [Difference(path, leaf, None, others[0])
                  for path, leaf in by_path[others[0]].items() if path not in here]  # fmt: skip
        return found

    def _how_far(self, first: Difference, rank: int) -> str:
        """Largest difference of two tensors' numbers, from the pieces in which they differ."""
        marks = self._ask("chunks", dict.fromkeys((first.other, rank), (self.name, first.path)))
        theirs, ours = marks[first.other], marks[rank]
        apart = [number for number, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b]
        looked = apart[:PIECES]
        numbers = self._ask("values", dict.fromkeys((first.other, rank), (self.name, first.path, looked)))
        flat = {r: [x for piece in numbers[r] for x in piece] for r in (first.other, rank)}
        return how_far(flat[first.other], flat[rank], complete=looked == apart)


def most_common(things: list[Any]) -> Any:
    """What stands most often in a list; of equals the first."""
    return Counter(things).most_common(1)[0][0]


def comparable(difference: Difference) -> bool:
    """Whether both are tensors of one kind, so that their numbers can be compared."""
    here, there = difference.here, difference.there
    return bool(here and there and here["nbytes"] and here["what"] == there["what"])


def how_far(there: list[float], here: list[float], *, complete: bool) -> str:
    """In words: how many numbers differ and by how much at most. `complete`: these are all that differ."""
    apart = [(a, b) for a, b in zip(there, here, strict=False) if a != b and not (math.isnan(a) and math.isnan(b))]
    if not apart:
        return ": equal as numbers, other bits (0 and -0, or NaN)"
    largest = max((abs(a - b) for a, b in apart if math.isfinite(a - b)), default=None)
    nan = sum(math.isnan(b) for _, b in apart)
    count = f"{len(apart):,} {'elements' if len(apart) > 1 else 'element'}{'' if complete else ' or more'}"
    said = [count]
    if largest is not None:
        number = f"{largest:,}" if isinstance(largest, int) else f"{largest:.3g}"
        said.append(f"by {'' if not complete else 'at most ' if len(apart) > 1 else ''}{number}"
                    f"{'' if complete else ' or more'}")  # fmt: skip
    if nan:
        said.append(f"{nan:,} NaN here")
    return f": {', '.join(said)}"


def grouped(texts: dict[int, str]) -> list[tuple[str, list[int]]]:
    """Equal texts with the ranks that have them, in the order of the lowest rank."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    return list(groups.items())
