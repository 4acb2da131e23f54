"""The engine: a live server's model that samples, computes gradients, takes steps, and saves and loads its state.

`bridge run`, `import bridge` and TRL stand on it.
Words: *policy* (the model of a live server, and all that trains it), *trainable* (the same without the server),
*reference* (the frozen model of a KL divergence).
May import: every package of `bridge` but `run` and `processes`.
"""
