"""What a program gives to `init` comes before what `ddl-magics run` says, and that before the defaults."""

from __future__ import annotations

import pytest

from ddl_magics.errors import UsageOnRankError
from ddl_magics.rank.asked import DEFAULTS, asked

OUTSIDE = {
    "DDL_MAGICS_STRATEGY": "zero:2",
    "DDL_MAGICS_SEED": "0",
    "DDL_MAGICS_STEPS": "5",
    "DDL_MAGICS_CHECKPOINT_ACTIVATIONS": "1",
    "DDL_MAGICS_PRECISION": "",
}


def test_the_defaults_are_those_of_a_cell() -> None:
    assert asked({}, {}) == (DEFAULTS, [])


def test_what_is_said_from_outside_fills_in_what_the_program_leaves_out() -> None:
    values, notes = asked({"strategy": None}, OUTSIDE)
    told = {"strategy": "zero:2", "seed": 0, "steps": 5, "checkpoint_activations": True}
    assert values == DEFAULTS | told
    assert notes == []


def test_the_programs_own_word_wins_and_a_sentence_says_so() -> None:
    values, notes = asked({"strategy": "ddp", "steps": 5, "checkpoint_activations": False}, OUTSIDE)
    assert (values["strategy"], values["steps"], values["checkpoint_activations"]) == ("ddp", 5, False)
    assert notes == [
        "the program gives strategy='ddp' to init; --strategy zero:2 is not used.",
        "the program gives checkpoint_activations=False to init; --checkpoint-activations is not used.",
    ]


@pytest.mark.parametrize(("variable", "text"), [("DDL_MAGICS_SEED", "x"), ("DDL_MAGICS_STEPS", "1.5")])
def test_a_variable_that_is_no_number_is_named(variable: str, text: str) -> None:
    with pytest.raises(UsageOnRankError, match=f"{variable}='{text}' is no number"):
        asked({}, {variable: text})


def test_no_steps_cannot_be() -> None:
    with pytest.raises(UsageOnRankError, match="steps=0 is no number of steps"):
        asked({"steps": 0}, {})
