"""Rewards: run an environment's score, which is foreign code, and accept only finite numbers from it.

Words: *score* (the method that judges a completion), *reward* (the finite number that is trained on), *recipe* (makes
the object that scores), *worker* (a process that scores), *supervisor* (the parent of a worker).
May import: `bridge.errors`, `bridge.types` and `bridge.core`.
"""
