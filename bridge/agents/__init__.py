"""Completions of several turns: a model that calls tools, and agents that get their turns from a base URL.

Words: *turn* (what the model samples until it stops), *trajectory* (a completion of several turns, with the answers of
tools between them), *run* (of an agent), *sequence* (tokens that one context held; a run may have several).
May import: `bridge.rollouts`, `bridge.scoring`, `bridge.weights.skeleton`, `bridge.config`, `bridge.core`.
"""
