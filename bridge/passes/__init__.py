"""Forward and backward passes over packed sequences: from samples to log-probabilities, and how many fit in one pass.

Terms: *sample* (a completion to train on), *pack* and *micro-batch* (the samples of one pass), *budget* (the most
tokens in a micro-batch), *part* (one tensor-parallel rank's share of the weights, or that rank), *block* (sharded
layers that take a full input and return a full output).
May import: torch, transformers, `bridge.config`, `bridge.errors`, `bridge.core.host_memory`, `bridge.planning`,
`bridge.ranks`, `bridge.weights`; nothing that depends on a server, a mode or a loss. Layers call torch.distributed's
collectives directly.
"""
