"""Completions from OpenAI-compatible servers: token ids, log-probabilities and the version that made them.

Words: *endpoint* (whom a rollout asks, and for what), *sampler* (asks for many prompts, over connections that are
kept), *fault* (what keeps an answer from coming), *try* (one request for a prompt), *rest* (a server is left out).
May import: `bridge.server.client`, `bridge.errors`, `bridge.core.interrupt`, `bridge.server.protocol`, `bridge.types`.
"""
