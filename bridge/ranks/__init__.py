"""Several processes that train replicas of one model in lockstep, each replica beside its own server.

Words: a *replica* is one server and its trainer, with a process for each GPU of the server; a *rank* is the number of
such a process; a *part* is what it holds of the weights, and the first part alone talks to the server; *peers*, which
hold the same part, share an optimizer; an *agreement* ends a phase: every rank tells how it went, and all go on or all
raise the same error.

May import: torch, `bridge.core`, `bridge.errors`. No other package calls torch.distributed.
"""
