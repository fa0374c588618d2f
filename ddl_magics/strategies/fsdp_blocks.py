"""Which parts of a model FSDP gathers one at a time: the repeated blocks; all the rest is gathered with the root.

Models of transformers name the classes of their blocks (`_no_split_modules`). In others a block is a member of a
`ModuleList` or `Sequential` whose members with parameters are several, all of one class and made of modules (a single
layer is too little to gather by itself, and may return a view, which torch's hooks do not bear); the outermost such
members count. A block that shares a parameter with another part (tied weights) stays with the root, since a parameter
belongs to one group only. Limits: a block must be called as a module; code that reads its parameters from outside
finds shards.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from ddl_magics.strategies.homes import homes

if TYPE_CHECKING:
    from collections.abc import Iterator


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, each once, in its own order; never the model itself."""
    named = _names_of_blocks(module)
    found = list(_of_classes(module, named)) or list(_repeated(module))
    uses = Counter(home.get() for home in homes(module))
    return [block for block in dict.fromkeys(found) if block is not module and _owns_all(block, uses)]


def _names_of_blocks(module: nn.Module) -> frozenset[str]:
    """Names of the classes that parts of the model call indivisible."""
    return frozenset(
        name for part in module.modules() for name in vars(type(part)).get("_no_split_modules", None) or ()
    ) | frozenset(name for part in module.modules() for name in vars(part).get("_no_split_modules", None) or ())


def _of_classes(module: nn.Module, names: frozenset[str]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child).__name__ in names and _has_parameters(child):
            yield child
        else:
            yield from _of_classes(child, names)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    members = [child for child in module.children() if _has_parameters(child)]
    alike = len(members) > 1 and len({type(member) for member in members}) == 1
    if isinstance(module, nn.ModuleList | nn.Sequential) and alike and next(members[0].children(), None) is not None:
        yield from members
        return
    for child in members:
        yield from _repeated(child)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _owns_all(block: nn.Module, uses: Counter[nn.Parameter]) -> bool:
    return all(uses[parameter] == count for parameter, count in Counter(home.get() for home in homes(block)).items())
