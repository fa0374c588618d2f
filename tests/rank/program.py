"""A program as a user writes it, run by any launcher: trains on numbers and prints what rank 0 saw."""

from __future__ import annotations

import json
import sys

import torch

import ddl_magics

torch.set_num_threads(1)
ddl = ddl_magics.init(sys.argv[1], seed=1, device="cpu")
with ddl.model_init():
    model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.arange(48.0).reshape(12, 4) / 48
loader = torch.utils.data.DataLoader(samples, batch_size=5, shuffle=True)
model, optimizer, loader = ddl.prepare(model, optimizer, loader)
losses = []
for batch in ddl.track(loader, epochs=2):
    loss = (model(batch) ** 2).mean()
    ddl.backward(loss)
    ddl.step()
    losses.append(ddl.gather_for_metrics(model(batch).detach() ** 2).mean().item())
with ddl.first():
    print(f"rank {ddl.rank} of {ddl.world_size}", file=sys.stderr)
place = [ddl.rank, ddl.world_size, ddl.local_rank, ddl.local_world_size, ddl.node_rank, ddl.world.nodes]
places = ddl.all_gather(place)  # a collective: every rank calls it
ddl.print(json.dumps({"losses": losses, "places": places, "modules": sorted(sys.modules)}))
