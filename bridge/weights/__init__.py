"""The one copy: what a server exports, how a trainer opens it, and the fence around each change.

Words: manifest, handle, storage, view, layout, attach, fence, version (see `bridge`).
May import: torch, transformers, `bridge.errors`, `bridge.core.process`, `bridge.core.memory`; never vLLM.
"""
