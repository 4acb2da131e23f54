"""AdamW on weights that somebody else also reads: written in place, with nothing lost to bf16.

Words: *master* (the float32 value of a weight, half of it the weight itself), *moments* (AdamW's two averages),
*slab* (the state of parameters that are stepped together), *release* (a gradient is used and dropped as it comes),
*offload* (states on the host).
May import: torch, `bridge.config`, `bridge.errors`; nothing that knows a model, a server or a loss. `state_bytes.py`
imports no torch.
"""
