"""A script for torchrun, with a part that is also a `%%ddl` cell: trains a small Llama, prints tokens a second."""

import ddl_magics

ddl = ddl_magics.init("ddp")

# The cell:
import statistics  # noqa: E402
import time  # noqa: E402

import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

length, batch_size, steps, warm_up = 128, 8, 60, 10
windows = torch.randint(2048, (steps * batch_size, length), generator=torch.Generator().manual_seed(0))
config = LlamaConfig(
    vocab_size=2048, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
    max_position_embeddings=length,
)  # fmt: skip
with ddl.model_init():
    model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader([{"input_ids": window, "labels": window} for window in windows], batch_size=batch_size)
model, optimizer, loader = ddl.prepare(model, optimizer, loader)
stamps = []
for batch in ddl.track(loader, epochs=1):
    loss = model(**batch).loss
    ddl.backward(loss)
    ddl.step(max_norm=1.0)
    stamps.append(time.perf_counter())
seconds = [after - before for before, after in zip(stamps[warm_up:], stamps[warm_up + 1 :], strict=False)]
# The mean holds all that a cell may cost, stalls too; the median step is what the sampler is judged by.
ddl.print(f"tokens a second {batch_size * length / statistics.mean(seconds)} ")
ddl.print(f"median step {statistics.median(seconds) * 1e3} ")

# After the cell:
ddl.close()
