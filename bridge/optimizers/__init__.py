"""AdamW that writes shared weights in place and loses no update to bf16.

Terms: *master* (a weight's float32 value; the bf16 weight is its upper half), *moments* (AdamW's two running averages),
*slab* (the state of parameters that are stepped together), *release* (using and dropping a gradient as soon as it is
complete), *offload* (keeping state in host memory).
May import: torch, `bridge.config`, `bridge.ranks`, `bridge.errors`.
"""
