"""One training run: the trainer's loop over steps, its checkpoints, its metrics, and the directory that keeps them.

Words: *step* (one batch, one publication), *checkpoint* (a Hugging Face folder plus what a run needs to resume),
*run directory* (all files of a run).
May import: every other package of `bridge`.
"""
