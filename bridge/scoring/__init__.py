"""Rewards: run an environment's score method, which is foreign code, and accept only finite numbers from it.

Terms: *score* (the method that judges a completion), *reward* (the finite number that is trained on), *host* (an object
that scores, and may have tools or an agent), *recipe* (a function that builds the host), *worker* (a process with a
host), *supervisor* (the parent process of a worker).
May import: `bridge.errors`, `bridge.types` and `bridge.core`.
"""
