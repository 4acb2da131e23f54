"""Training: the loop from rollouts to published weights, what it learns from, and what it leaves behind.

Words: *experience* (problems, completions and rewards), *update* (one optimizer step), *checkpoint* (a plain Hugging
Face folder with what a run needs to go on).
May import: `bridge.passes`, `bridge.loss`, `bridge.optimizers`, `bridge.files`; modes are known by their protocol,
but in `loop.py`.
"""
