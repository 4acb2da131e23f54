"""One training run: the trainer's loop over steps, what it measures, reports and saves, and how it resumes.

Words: *step* (one batch, one publication).
May import: every other package of `bridge`.
"""
