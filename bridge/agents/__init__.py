"""Multi-turn completions: models that call tools, and agents that request their turns from a base URL.

Terms: *turn* (what the model samples until it stops), *trajectory* (a completion of several turns with tool results
between them), *run* (one execution of an agent), *sequence* (the tokens of one context; a run may have several).
May import: `bridge.rollouts`, `bridge.scoring`, `bridge.weights.skeleton`, `bridge.config`, `bridge.core`.
"""
