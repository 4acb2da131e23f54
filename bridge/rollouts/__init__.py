"""Streams of scored groups for the trainer, sampled from OpenAI-compatible servers.

Terms: *stream* (a source from which the trainer takes finished groups), *endpoint* (a server, and the name of the model
to request from it), *try* (one request for a prompt), *cooldown* (a failed server gets no requests for a while).
May import: `bridge.scoring`, `bridge.server`, `bridge.weights.skeleton`, `bridge.config`, `bridge.core`.
"""
