"""AdamW that writes shared weights in place and loses no update to bf16.

Words: *master* (a weight's float32 value, of which the bf16 weight is the upper half), *moments* (AdamW's two running
averages), *slab* (state of parameters that are stepped together), *release* (a gradient is used and dropped as soon as
it is complete), *offload* (state in host memory).
May import: torch, `bridge.config`, `bridge.ranks`, `bridge.errors`.
"""
