"""The one copy: what a server exports, and how a trainer opens it.

Terms: manifest, handle, storage, view, layout, attach, version (see `bridge`).
May import: torch, transformers, `bridge.server.manifest`, `bridge.config`, `bridge.core`; never vLLM.
"""
