"""Where the parts of a model keep their parameters: every place, those of tied weights too.

`named_parameters` tells a tied weight once; whoever puts another tensor in its stead must reach all its places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from ddl_magics.strategies.kept import first_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddl_magics.strategies.base import Whole


class Home(NamedTuple):
    """A place where a module keeps a parameter."""

    module: nn.Module
    name: str

    def get(self) -> nn.Parameter:
        return self.module._parameters[self.name]  # type: ignore[return-value]

    def put(self, parameter: nn.Parameter) -> None:
        self.module._parameters[self.name] = parameter


def homes(module: nn.Module) -> Iterator[Home]:
    """Yield every place of a parameter, in the order of the modules."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield Home(part, name)


def replace(module: nn.Module, successor: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """Put another tensor in the place of every parameter, tied ones staying tied; None leaves one as it is.

    One is replaced in all its places before the next is asked for, so that its memory is free by then.
    """
    places: dict[nn.Parameter, list[Home]] = {}
    for home in homes(module):
        places.setdefault(home.get(), []).append(home)
    while places:
        old = next(iter(places))
        own = places.pop(old)
        tensor = successor(old)
        if tensor is not None:
            new = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=old.requires_grad)
            for home in own:
                home.put(new)


# From a model on the meta device to one with weights


def names_on_meta(module: nn.Module) -> dict[nn.Parameter, str]:
    """Parameters without memory, each with its first name."""
    named = first_names(module)
    return {tensor: name for name, tensor in named.items() if isinstance(tensor, nn.Parameter) and tensor.is_meta}


@torch.no_grad()
def read_buffers(module: nn.Module, read: Callable[[str], Whole]) -> None:
    """Fill persistent buffers, which a constructor has made already; the others are right as it made them."""
    for name, tensor in first_names(module).items():
        if not isinstance(tensor, nn.Parameter):
            tensor.copy_(read(name)[...])


@torch.no_grad()
def read_whole(module: nn.Module, read: Callable[[str], Whole], device: str) -> None:
    """Give every parameter that is on the meta device its whole tensor, one after the other."""
    named = names_on_meta(module)

    def made(old: nn.Parameter) -> torch.Tensor | None:
        return read(named[old])[...].to(device, old.dtype, copy=True) if old in named else None

    replace(module, made)
    read_buffers(module, read)
