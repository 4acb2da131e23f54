"""One training run: the trainer's loop over steps, its metrics, reports and checkpoints, and how it resumes.

Terms: *step* (one batch, one publication).
May import: every other package of `bridge`.
"""
