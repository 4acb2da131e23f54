"""Rewards: call the score of an environment, which is foreign code, and take nothing but finite numbers from it.

Words: *score* (what an environment makes of a completion), *reward* (the finite number that is learnt from).
May import: `bridge.errors` and `bridge.types`.
"""
