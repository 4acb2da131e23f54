"""Whether it fits, before anything is loaded: sizes of models from their files, and bytes of what training holds.

Words: *need* (what one way to train takes), *share* (vLLM's part of a GPU), *asleep* (the KV cache, while training).
May import: `bridge.config`, `bridge.errors`, `bridge.optimizers.state_bytes`; no torch: an answer takes no second.
"""
