"""The engine: a live server's model that samples, computes gradients, takes steps, and saves and loads its state.

`bridge run`, `import bridge` and the TRL integration are built on it.
Terms: *policy* (a live server's model, and everything that trains it), *trainable* (the same without the server),
*reference* (the frozen model of a KL divergence).
May import: every package of `bridge` except `run` and `processes`.
"""
