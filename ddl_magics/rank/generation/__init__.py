"""Text from a causal language model over all ranks: `ddl.generate`.

`prompts` reads what the user gave into tokens, `options` what may be asked of transformers' `generate`, `plan` deals
the prompts out to the ranks and lets them agree, `run` generates this rank's batches, `draws` samples each text from a
generator of its own, `stream` takes the tokens as they come, and `result` holds the texts with their figures. `call`
puts them together.
"""
