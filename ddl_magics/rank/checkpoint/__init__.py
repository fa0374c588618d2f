"""What a checkpoint is on disk, how it is written and how it is read: `ddl.save` and `ddl.load`.

`writing` and `reading` are the two calls; the rest is one idea a file. A checkpoint is one folder `step-N/` inside the
folder that the user names: a Hugging Face folder with the whole weights, `optimizer/` for
`torch.distributed.checkpoint`, and `ddl.json` with everything else. See docs/checkpoints.md.
"""
