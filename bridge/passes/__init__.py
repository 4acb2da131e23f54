"""Forward and backward passes over packed sequences: from samples to log-probabilities, and how many fit at once.

Words: *sample* (a completion to train on), *pack* and *micro-batch* (samples in one pass), *budget*
(tokens of a micro-batch), *part* (what a process of several holds of the weights), *block* (cut layers between whole
input and whole output).
May import: torch, transformers, `bridge.config`, `bridge.errors`, `bridge.core.host_memory`, `bridge.planning`,
`bridge.ranks`, `bridge.weights`; nothing that knows a server, a mode or a loss. Collectives inside a layer are
torch.distributed's own.
"""
