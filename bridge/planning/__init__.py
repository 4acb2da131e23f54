"""Decide whether a run fits before anything is loaded, from the model's files and the bytes that training holds.

Words: *need* (what a run takes), *share* (vLLM's part of a GPU), *asleep* (the KV cache, while training).
May import: `bridge.config`, `bridge.errors`; no torch, which takes seconds.
"""
