"""Rewards: call the score of an environment, which is foreign code, and take nothing but finite numbers from it.

Words: *score* (what an environment makes of a completion), *reward* (the finite number that is learnt from), *fault*
(what a score did instead of giving one), *worker* (a process that scores), *supervisor* (the parent of a worker),
*recipe* (makes what scores, in a worker).
May import: `bridge.errors` and `bridge.types`.
"""
