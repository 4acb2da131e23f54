"""Finished groups for the trainer, sampled from OpenAI-compatible servers and scored.

Words: *stream* (what the trainer takes finished groups from), *endpoint* (a server, and the model to request from it),
*try* (one request for a prompt), *rest* (the time for which a server that failed gets no requests).
May import: `bridge.scoring`, `bridge.server`, `bridge.weights.skeleton`, `bridge.config`, `bridge.core`.
"""
