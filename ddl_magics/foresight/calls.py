"""What a call is: a collective, the rank, a function of the notebook to go through, or nothing that matters here."""

from __future__ import annotations

import ast

from ddl_magics.foresight import names
from ddl_magics.foresight.expressions import Expressions
from ddl_magics.foresight.values import (
    LARGEST,
    NOTHING,
    UNKNOWN,
    Class,
    Function,
    Group,
    Instance,
    Method,
    Ref,
    Value,
    plain,
    shortened,
)
from ddl_magics.foresight.walk import Frame, Guard, Item

GROUP_WORDS = {"group", "process_group", "mesh", "device_mesh", "pg"}
GROUP_PLACE = {
    "barrier": 0, "monitored_barrier": 0, "reduce": 3, "scatter": 3, "gather": 3, "reduce_scatter": 3,
    "reduce_scatter_tensor": 3, "gather_object": 3, "scatter_object_list": 3, "all_to_all_single": 4,
}  # fmt: skip
"""Where the group stands among the positional arguments; third in most."""

DEEPEST = 4
"""Calls into functions of the notebook that are followed."""


class Calls(Expressions):
    """Works out calls."""

    returned: Value = NOTHING

    def _call(self, node: ast.Call) -> Value:
        called = self.visit(node.func)
        args = [self.visit(arg.value if isinstance(arg, ast.Starred) else arg) for arg in node.args]
        words = {word.arg: self.visit(word.value) for word in node.keywords}
        if isinstance(called.it, Function | Method | Class):
            return self.follow(called.it, node, args, words)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        dotted = called.it.dotted if isinstance(called.it, Ref) else name
        name = dotted.rpartition(".")[2]
        if name in names.RANK_CALLS or name in names.SIZE_CALLS or name == "get_process_group_ranks":
            group = next((each.it for each in (*args, *words.values()) if isinstance(each.it, Group)), Group())
            return self._asked(name, group.ranks)
        if name in names.MAIN_ATTRIBUTES:
            return Value(self.place.rank == 0, by_rank=True)
        if dotted in {"torch.distributed.is_initialized", "torch.distributed.is_available"}:
            return Value(True)
        if dotted in {"os.environ.get", "os.getenv", "environ.get", "getenv"} and args:
            return self._variable(args[0].it, args[1] if len(args) > 1 else NOTHING)
        if isinstance(called.it, Ref):
            return self._library(dotted, node, args, words)
        return self._builtin(name, args) if isinstance(node.func, ast.Name) and not self.bound(name) else NOTHING

    def _library(self, dotted: str, node: ast.Call, args: list[Value], words: dict[str | None, Value]) -> Value:
        key = names.collective(dotted)
        if key:
            self._enter(key, node, self._of_group(key, args, words))
        if key == "new_group":
            return Value(self._new_group(args, words))
        made = names.made(dotted)
        return Value(Ref(made)) if made else NOTHING

    def _asked(self, name: str, within: tuple[int, ...] | None) -> Value:
        """The rank, the size or the ranks of a group; of all ranks where it is not known."""
        if name in names.SIZE_CALLS:
            return Value(self.place.world_size if within is None else len(within))
        if name not in names.RANK_CALLS:
            return NOTHING if within is None else Value(within)
        if within is None:
            return self.rank_of("local" in name)
        return Value(within.index(self.place.rank) if self.place.rank in within else -1, by_rank=True)

    def _new_group(self, args: list[Value], words: dict[str | None, Value]) -> Group:
        given = (args[0] if args else words.get("ranks", Value(None))).it
        if given is None and None not in words:
            return Group(tuple(range(self.place.world_size)))
        known = isinstance(given, tuple | range) and len(given) <= LARGEST and all(isinstance(r, int) for r in given)
        return Group(tuple(sorted(given)) if known else None)

    def _of_group(self, key: str, args: list[Value], words: dict[str | None, Value]) -> Group | None:
        """The group that the call is about; None where it is about all ranks."""
        if key in names.EVERYWHERE:
            alone = key == "new_group" and words.get("use_local_synchronization", NOTHING).it is True
            return self._new_group(args, words) if alone else None
        place = GROUP_PLACE.get(key, 2)
        given = [value.it for word, value in words.items() if word in GROUP_WORDS]
        given += [value.it for at, value in enumerate(args) if at == place or isinstance(value.it, Group)]
        everybody = ("group.WORLD", "GroupMember.WORLD")
        for it in given:
            if not plain(it) and not (isinstance(it, Ref) and it.dotted.endswith(everybody)):
                return it if isinstance(it, Group) else Group(foreign=True)
        return None

    def _enter(self, key: str, node: ast.Call, group: Group | None) -> None:
        lines = [*(frame.line for frame in self.calls), node.lineno]
        depth = self.guards[-1].depth if self.guards else len(self.calls)
        elsewhere = (at for at, frame in enumerate(self.calls) if frame.function.serial != self.serial)
        depth = min(depth, next(elsewhere, depth))  # a line of another cell would say nothing here
        text = shortened(ast.unparse(node.func), 50)
        if depth < len(self.calls):
            text += f" (in {self.calls[depth].function.node.name}())"
        if self.turns:
            self.in_turn.append((lines[depth], text, self.turns[-1]))
        self.items.append(Item(key, text, lines[depth], tuple(self.guards), tuple(self.marks), group))

    def _builtin(self, name: str, args: list[Value]) -> Value:
        by_rank = any(arg.by_rank for arg in args)
        known = args and all(plain(arg.it) for arg in args)
        if name == "range" and len(args) == 1 and by_rank and not known:
            return Value(range(0 if self.place.rank == 0 else 2), by_rank, guessed=True)  # some count that differs
        call = {"int": int, "bool": bool, "float": float, "str": str, "range": range, "len": len, "abs": abs,
                "min": min, "max": max, "tuple": tuple, "list": tuple, "set": tuple}.get(name)  # fmt: skip
        if not call or not known:
            return NOTHING if name == "range" or not call else Value(UNKNOWN, by_rank)
        try:
            return Value(call(*(arg.it for arg in args)), by_rank)  # type: ignore[operator]
        except (TypeError, ValueError):
            return NOTHING

    # Functions of the notebook.

    def follow(
        self, what: Function | Method | Class, node: ast.Call, args: list[Value], words: dict[str | None, Value]
    ) -> Value:
        """Go through a function that is called, with its arguments; its first return decides its value."""
        if isinstance(what, Class):
            made = Instance(what)
            if "__init__" in what.methods:
                self._enter_function(what.methods["__init__"], node.lineno, [Value(made), *args], words)
            return Value(made)
        if isinstance(what, Method):
            return self._enter_function(what.function, node.lineno, [Value(what.owner), *args], words)
        return self._enter_function(what, node.lineno, args, words)

    def _enter_function(
        self, function: Function, line: int, args: list[Value], words: dict[str | None, Value]
    ) -> Value:
        self.followed.add(id(function.node))
        running = any(frame.function.node is function.node for frame in self.calls)
        if running or len(self.calls) >= DEEPEST or (function.on_rank_0 and self.place.rank != 0):
            return NOTHING
        local = self._parameters(function, args) | {word or "": value for word, value in words.items()}
        guards, marks, before = len(self.guards), len(self.marks), self.returned
        if function.on_rank_0:
            self.guards.append(Guard(f"@{function.decorator} lets it through", one=True, depth=len(self.calls)))
        self.calls.append(Frame(line, function))
        self.scopes.append(local)
        self.returned = NOTHING
        self.run(function.node.body)
        self.scopes.pop()
        self.calls.pop()
        del self.guards[guards:], self.marks[marks:]
        value, self.returned = self.returned, before
        return value

    def _parameters(self, function: Function, args: list[Value]) -> dict[str, Value]:
        """Values by parameter. One that nobody gives is what its default or its name says."""
        given = function.node.args
        placed = [*given.posonlyargs, *given.args]
        usual = {"rank", "local_rank", "world_size"}
        local = {p.arg: self.scopes[0].get(p.arg, NOTHING) if p.arg in usual else NOTHING
                 for p in (*placed, *given.kwonlyargs)}  # fmt: skip
        for parameter, default in zip(reversed(placed), reversed(given.defaults), strict=False):
            local[parameter.arg] = self.visit(default)
        return local | {parameter.arg: value for parameter, value in zip(placed, args, strict=False)}

    def run_alone(self, function: Function, owner: Class | None) -> None:
        """Go through a function that the cell defines and does not call."""
        self.scopes.append(self._parameters(function, [Value(Instance(owner))] if owner else []))
        self.run(function.node.body)
        self.scopes.pop()
