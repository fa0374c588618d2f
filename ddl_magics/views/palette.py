"""The colours and names of things, the same in every picture (Okabe and Ito's palette: told apart by everybody)."""

from __future__ import annotations

KINDS = {
    "parameters": ("#0072B2", "parameters", "P"),
    "gradients": ("#E69F00", "gradients", "G"),
    "optimizer": ("#009E73", "optimizer state", "O"),
    "other": ("#CC79A7", "activations, other", "A"),
    "reserved": ("#B9BEC5", "reserved, free", "r"),
}
"""Kind of memory -> colour, name, letter in plain text; in stacking order."""

BLUE = "#0072B2"
WARNING = "#D55E00"
"""For sentences and marks that ask for attention."""

STATES = {
    "running": ("#0072B2", "run"),
    "waiting": ("#E69F00", "wait"),
    "stopped": ("#56B4E9", "stopped at a breakpoint"),
    "released": ("#CC79A7", "released"),
    "dead": ("#D55E00", "dead"),
    "idle": ("#999999", "idle"),
    "starting": ("#999999", "no record yet"),
    "ok": ("#009E73", "finished"),
    "error": ("#D55E00", "failed"),
    "interrupted": ("#D55E00", "interrupted"),
}
"""State or outcome of a rank -> colour, word for several ranks."""
