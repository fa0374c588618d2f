"""Which names are collectives, and which the rank: of torch, DeepSpeed, Accelerate, Fabric, AxoNN, MPI and `ddl`.

A name is looked up in full (`torch.distributed.all_reduce`), whatever a cell calls it; an object is its class with
`()`. Limits: collectives hidden in the code of a library (a model's forward, `loss.backward()`) are not known.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TORCH = _words("""
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_tensor
    all_gather_tensor_autograd
    all_reduce all_reduce_coalesced all_to_all all_to_all_single all_to_all_single_autograd barrier broadcast
    broadcast_object_list gather gather_object monitored_barrier permute_tensor reduce reduce_scatter
    reduce_scatter_tensor reduce_scatter_tensor_autograd scatter scatter_object_list
    init_process_group new_group new_subgroups new_subgroups_by_enumeration split_group init_device_mesh
    distribute_tensor distribute_module parallelize_module fully_shard FullyShardedDataParallel
    get_model_state_dict get_optimizer_state_dict get_state_dict
    set_model_state_dict set_optimizer_state_dict set_state_dict
    """)
"""Below `torch.distributed`. Point-to-point calls belong under a condition on the rank and are not among them."""

MPI = _words("""
    Allgather Allgatherv Allreduce Alltoall Alltoallv Barrier Bcast Dup Exscan Gather Gatherv Reduce Reduce_scatter Scan
    Scatter Scatterv Split allgather allreduce alltoall barrier bcast exscan gather reduce scan scatter
    """)

COLLECTIVES: tuple[tuple[str, frozenset[str]], ...] = (
    ("ddl", _words("""
        all_gather all_reduce_mean backward barrier first full_state_dict gather_for_metrics generate load load_adapter
        load_full_state_dict prepare save save_adapter step
    """)),
    ("torch.distributed", TORCH),
    ("torch.distributed.checkpoint", _words("async_save load load_state_dict save save_state_dict")),
    ("torch.nn.parallel", _words("DistributedDataParallel")),
    ("deepspeed", _words("init_distributed init_inference initialize")),
    ("deepspeed.zero", _words("GatheredParameters Init")),
    ("deepspeed.comm", TORCH),
    ("deepspeed.initialize()", _words("""
        backward eval_batch load_checkpoint save_16bit_model save_checkpoint step train_batch
    """)),
    ("accelerate.Accelerator()", _words("""
        backward gather gather_for_metrics load_state pad_across_processes prepare prepare_model reduce save_state
        wait_for_everyone
    """)),
    ("accelerate.PartialState()", _words("wait_for_everyone")),
    ("accelerate.utils", _words("""
        broadcast broadcast_object_list gather gather_object pad_across_processes reduce wait_for_everyone
    """)),
    ("lightning.Fabric()", _words("""
        all_gather all_reduce backward barrier broadcast load load_raw save setup setup_module
    """)),
    ("transformers.Trainer()", _words("evaluate predict train")),
    ("axonn", _words("init sync_gradients sync_gradients_data_parallel sync_gradients_depth_parallel")),
    ("mpi4py.MPI.COMM_WORLD", MPI),
)  # fmt: skip
"""(where, names there). The longest place that fits decides; what is below a place counts as there."""

EVERYWHERE = frozenset({"init_process_group", "new_group", "new_subgroups", "init_device_mesh", "split_group"})
"""Collectives of the whole world, whatever group they are about."""

IN_TURN = frozenset({
    "ddl.first", "accelerate.Accelerator().main_process_first", "accelerate.Accelerator().local_main_process_first",
    "accelerate.PartialState().main_process_first", "lightning.Fabric().rank_zero_first",
})  # fmt: skip
"""Blocks through which one rank goes while the others wait outside."""

ON_RANK_0 = frozenset({
    "rank_zero_only", "on_main_process", "on_local_main_process",
})  # fmt: skip
"""Decorators after which a function does its work on rank 0 only."""

RANK_ATTRIBUTES = frozenset({
    "rank", "global_rank", "local_rank", "process_index", "local_process_index", "node_rank",
})  # fmt: skip
MAIN_ATTRIBUTES = frozenset({
    "is_main_process", "is_local_main_process", "is_global_zero", "is_rank_zero", "is_world_process_zero",
    "is_local_process_zero", "is_master", "is_main", "is_rank0", "main_process",
})  # fmt: skip
"""True on rank 0 only, as an attribute or as a method, of whatever object."""

RANK_CALLS = frozenset({"get_rank", "get_local_rank", "get_node_local_rank", "Get_rank"})
SIZE_CALLS = frozenset({"get_world_size", "Get_size"})
RANK_VARIABLES = frozenset({
    "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK",
})  # fmt: skip
LOCAL_VARIABLES = frozenset({
    "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
})  # fmt: skip

PREDEFINED = {
    "dist": "torch.distributed",
    "torch": "torch",
    "nn": "torch.nn",
    "os": "os",
    "sys": "sys",
    "dcp": "torch.distributed.checkpoint",
    "funcol": "torch.distributed._functional_collectives",
    "DDP": "torch.nn.parallel.DistributedDataParallel",
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "FSDP": "torch.distributed.fsdp.FullyShardedDataParallel",
    "FullyShardedDataParallel": "torch.distributed.fsdp.FullyShardedDataParallel",
    "fully_shard": "torch.distributed.fsdp.fully_shard",
    "deepspeed": "deepspeed",
    "accelerator": "accelerate.Accelerator()",
    "fabric": "lightning.Fabric()",
    "engine": "deepspeed.initialize()",
    "model_engine": "deepspeed.initialize()",
    "ddl": "ddl",
    "MPI": "mpi4py.MPI",
}
"""What these names usually are, where no cell has said so."""

EXITS = frozenset({"sys.exit", "os._exit", "os.abort", "exit", "quit"})


def collective(dotted: str) -> str:
    """The name of the collective behind a full name, the same for the same collective; empty for anything else."""
    where, _, name = dotted.rpartition(".")
    best = ""
    for place, known in COLLECTIVES:
        if name in known and (where == place or where.startswith(place + ".")) and len(place) >= len(best):
            best = place
    return f"ddl.{name}" if best == "ddl" else name if best else ""


def canonical(dotted: str) -> str:
    """The one name of what libraries offer under several."""
    for prefix in ("lightning.fabric.", "lightning_fabric.", "lightning.pytorch.", "pytorch_lightning."):
        if dotted.startswith(prefix):
            return "lightning." + dotted[len(prefix) :]
    return dotted


def made(dotted: str) -> str:
    """The full name of what calling a name gives, where its methods matter; else empty."""
    name = dotted.rpartition(".")[2]
    if dotted == "deepspeed.initialize" or name in {"Accelerator", "PartialState"}:
        return f"{dotted if name == 'initialize' else 'accelerate.' + name}()"
    if dotted.startswith("lightning.") and name == "Fabric":
        return "lightning.Fabric()"
    if dotted == "ddl_magics.init":
        return "ddl"
    if name.endswith("Trainer") and dotted.startswith(("transformers.", "trl.")):
        return "transformers.Trainer()"
    return ""
