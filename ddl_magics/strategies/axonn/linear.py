"""AxoNN's parallel linear layer, made from a plain one, with the gradient of its bias corrected.

AxoNN 0.2 gathers the bias over the ranks that share out the outputs, and in the backward takes only this rank's slice
of this rank's gradient: what the other ranks of the block computed from their part of the batch is lost. Here the
gradient is summed over the block first, as that of the weight is.
Import after `adapter.load`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from axonn.intra_layer import Linear
from axonn.intra_layer.fully_connected import extract_local_params_from_full_params

from ddl_magics.strategies.pieces import Piece, collect, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddl_magics.strategies.axonn.groups import Groups
    from ddl_magics.strategies.base import Whole


class _Group:
    """A process group of a layer, read from the layer's `groups`; AxoNN's constructor may set it to the same."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        return self if layer is None else layer.groups[self.name]

    def __set__(self, layer: Any, group: Any) -> None:
        assert group is layer.groups[self.name]


class _BlockBias(torch.autograd.Function):
    """The whole bias, gathered already, with the gradient of this rank's slice summed over the block."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, whole: torch.Tensor, groups: Groups) -> torch.Tensor:
        ctx.groups = groups
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        block, outer = ctx.groups["block"], ctx.groups["outer"]
        if dist.get_world_size(block) > 1:
            dist.all_reduce(total, group=block)
        return total.chunk(dist.get_world_size(outer))[dist.get_rank(outer)].clone(), None, None


class ParallelLinear(Linear):
    """`y = x W^T + b`, with W `[out_features, in_features]` and b `[out_features]` shared out over a grid of ranks.

    `weight` is flat, `out/row * in/column / depth` long, and `bias` is `out/row` long, the same along columns and
    depth. Takes and gives whole activations of this rank's own slice of the batch, `[..., in]` to `[..., out]`
    (AxoNN's easy mode); forward and backward are collectives of the grid.
    """

    inner_group = _Group("inner")
    outer_group = _Group("outer")
    depth_group = _Group("depth")

    def __init__(self, plain: torch.nn.Linear, groups: Groups) -> None:
        object.__setattr__(self, "groups", groups)
        groups.activate()
        with _default_dtype(plain.weight.dtype):
            super().__init__(
                plain.in_features,
                plain.out_features,
                bias=plain.bias is not None,
                skip_bias_add=True,
                # From the meta device there is nothing to copy; memory that nobody has touched costs none.
                init_method=lambda whole: whole if plain.weight.is_meta else whole.copy_(plain.weight),
            )
        _settle(self.weight, self.weight.clone(), plain.weight)
        if plain.bias is not None:
            _settle(self.bias, self.bias if plain.bias.is_meta else self.cut("bias", plain.bias), plain.bias)
        self.train(plain.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return super().forward(x)  # type: ignore[no-any-return]
        product, whole = super().forward(x)
        bias = _BlockBias.apply(self.bias, whole.detach(), self.groups)  # type: ignore[no-untyped-call]
        return product + bias.to(product.dtype)  # type: ignore[no-any-return]

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Shard of this rank from a tensor shaped as the whole `weight` or `bias`, in storage of its own."""
        if name == "bias":
            return whole.chunk(dist.get_world_size(self.outer_group))[dist.get_rank(self.outer_group)].clone()
        shard = extract_local_params_from_full_params(whole, self.outer_group, self.inner_group, self.depth_group)
        return shard.clone()  # type: ignore[no-any-return]

    def join(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """Whole `[out, in]` weight or `[out]` bias from every rank's shard, the inverse of `cut`; a collective."""
        group = self.groups["outer" if name == "bias" else "copy"]
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, shard.contiguous(), group=group)
        if name == "bias":
            return torch.cat(shards)
        # AxoNN numbers the ranks of a copy depth first, then row, then column.
        row, column, depth = self.groups.grid
        out, inputs = self.out_features // row, self.in_features // column
        blocks = torch.stack(shards).view(depth, row, column, -1).permute(1, 2, 0, 3).reshape(row, column, out, inputs)
        return blocks.transpose(1, 2).reshape(self.shape_of(name))

    def join_on(self, name: str, shard: torch.Tensor, to: int) -> torch.Tensor | None:
        """As `join`, on the CPU of rank `to` alone, None on the others, block after block: one whole, and one block.

        The ranks of that rank's own copy of the model send it their shards; of a bias, the first of those that hold
        the same. All ranks call it.
        """
        world, ranks = self.groups.world, dist.get_process_group_ranks(self.groups["copy"])
        if to not in ranks:
            return None
        row, column, _ = self.groups.grid
        size, flat = shard.numel(), shard.reshape(-1)

        def collected(holders: list[int]) -> torch.Tensor | None:
            pieces = [Piece(rank, number * size, (number + 1) * size) for number, rank in enumerate(holders)]
            numel = len(holders) * size
            return collect(pieces, flat, numel=numel, rank=world.rank, to=to, device=world.device)

        # AxoNN numbers the ranks of a copy depth first, then row, then column.
        if name == "bias":
            return collected(ranks[: row * column : column])
        whole = torch.empty(self.shape_of(name), dtype=shard.dtype) if world.rank == to else None
        for number in range(row * column):
            block = collected(ranks[number :: row * column])
            if whole is not None and block is not None:
                rows, columns = self._block(*divmod(number, column))
                whole[rows, columns] = block.view(-1, self.in_features // column)
        return whole

    def read(self, name: str, whole: Whole) -> torch.Tensor:
        """As `cut`, from a whole tensor that may be on disk: reads the rows of this rank's block that it needs."""
        outer, inner, depth = (dist.get_rank(self.groups[group]) for group in ("outer", "inner", "depth"))
        if name == "bias":
            size = self.out_features // self.groups.grid.row
            return read(whole, outer * size, (outer + 1) * size)
        size = self.out_features * self.in_features // self.groups.grid.size
        return read(whole, depth * size, (depth + 1) * size, *self._block(outer, inner))

    def _block(self, row: int, column: int) -> tuple[slice, slice]:
        """Rows and columns of the whole weight that stand at a place of the grid."""
        out, inputs = self.out_features // self.groups.grid.row, self.in_features // self.groups.grid.column
        return slice(row * out, (row + 1) * out), slice(column * inputs, (column + 1) * inputs)

    def shape_of(self, name: str) -> torch.Size:
        """Shape of the whole `weight` or `bias`."""
        return torch.Size((self.out_features,) if name == "bias" else (self.out_features, self.in_features))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"grid={self.groups.grid.text}"
        )


def _settle(parameter: Any, shard: torch.Tensor, plain: torch.Tensor) -> None:
    """Give a parameter its shard, which has storage of its own: AxoNN's slice would keep the whole block alive."""
    parameter.data = shard.detach() if plain.is_meta else shard.detach().to(plain.device)
    parameter.requires_grad_(plain.requires_grad)
    del parameter.process_group_for_norm_reduction  # a reference to a group, see `groups`


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """AxoNN allocates in the default type, which may hold less than the weight has."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
