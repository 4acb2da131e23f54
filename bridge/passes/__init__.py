"""Forward and backward passes over packed sequences: from samples to log-probabilities, and how many fit at once.

Words: *sample* (a completion to train on), *pack* and *micro-batch* (samples behind one another, one pass), *budget*
(tokens of a micro-batch).
May import: torch, transformers, `bridge.config`, `bridge.errors`, `bridge.core.memory`, `bridge.planning`; nothing that
knows a server, a mode or a loss.
"""
