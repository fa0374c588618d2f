"""A script for torchrun, with a part that is also a `%%ddl` cell: the first all-reduce of a new world."""

import os

import torch.distributed as dist

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])

# The cell:
import time  # noqa: E402

import torch  # noqa: E402

one = torch.ones(1)
torch.distributed.all_reduce(one)
if rank == 0:
    print(f"finished at {time.time()} ", flush=True)

# After the cell:
dist.destroy_process_group()
