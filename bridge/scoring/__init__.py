"""Rewards: run an environment's score, which is foreign code, and accept only finite numbers from it.

Words: *score* (the method that judges a completion), *reward* (the finite number that is trained on), *host* (an object
that scores, and may have tools or an agent), *recipe* (makes the host), *worker* (a process with a host), *supervisor*
(the parent of a worker).
May import: `bridge.errors`, `bridge.types` and `bridge.core`.
"""
