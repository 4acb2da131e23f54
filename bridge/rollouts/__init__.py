"""Completions from OpenAI-compatible servers: token ids, log-probabilities and the version that made them.

Words: *endpoint* (whom a rollout asks, and for what), *sampler* (asks, again where it may, and reads the answers).
May import: `bridge.client`, `bridge.errors`, `bridge.protocol`, `bridge.types`.
"""
