"""What a program asked of `ddl_magics.init`, and what was asked of it from outside by `ddl-magics run`.

Whoever started the program says it by variables; what the program itself gives as an argument comes first, and a
sentence says that the other is not used. Neither: the default, as in a cell.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ddl_magics.errors import UsageOnRankError
from ddl_magics.protocol import PROGRAM_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULTS: dict[str, Any] = {
    "strategy": "ddp",
    "precision": "32",
    "checkpoint_activations": False,
    "steps": None,
    "seed": None,
    "device": "auto",
}
NUMBERS = {"steps", "seed"}


def asked(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> tuple[dict[str, Any], list[str]]:
    """Values of all options, and a sentence for each that was asked from outside in vain.

    Parameters
    ----------
    given
        The program's arguments by name, None for those that it left out.
    environ
        Variables of `PROGRAM_VARIABLES`.

    Raises
    ------
    UsageOnRankError
        A variable, or a number, cannot be read as what it should be.
    """
    outside = {name: _read(name, environ) for name in DEFAULTS}
    values, notes = dict(DEFAULTS), []
    for name, value in outside.items():
        own = given.get(name)
        if own is not None:
            values[name] = own
            if value is not None and value != own:
                notes.append(f"the program gives {name}={own!r} to init; {_option(name, value)} is not used.")
        elif value is not None:
            values[name] = value
    steps = values["steps"]
    if steps is not None and steps < 1:
        raise UsageOnRankError(f"steps={steps} is no number of steps", "Give 1 or more.")
    return values, notes


def _read(name: str, environ: Mapping[str, str]) -> Any:
    """The value that a variable gives; None where it is not set, or empty."""
    text = environ.get(PROGRAM_VARIABLES[name], "").strip()
    if not text:
        return None
    if name == "checkpoint_activations":
        return text not in ("0", "false")
    if name not in NUMBERS:
        return text
    try:
        return int(text)
    except ValueError:
        message = f"{PROGRAM_VARIABLES[name]}={text!r} is no number"
        raise UsageOnRankError(message, "Set it to one, or unset it.") from None


def _option(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag} {value}"
