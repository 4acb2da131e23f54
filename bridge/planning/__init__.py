"""Decide whether a run fits into memory before anything is loaded, from the model's files and training's needs.

Terms: *need* (the memory that a run takes), *share* (vLLM's part of a GPU), *asleep* (a KV cache freed while training).
May import: `bridge.config`, `bridge.errors`; no torch, which takes seconds.
"""
