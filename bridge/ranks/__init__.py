"""Several processes that train replicas of one model in lockstep, each replica beside its own server.

Terms are torch's: a *rank* is one of `world_size` processes. The ranks of one server hold its weights by tensor
parallelism (`tp_rank` of `tp_size`, the `tp_group`); the servers are data-parallel replicas (`dp_rank` of `dp_size`).
Ranks with the same part of the weights share an optimizer (the `dp_group`). By context parallelism, replicas cut the
tokens of a micro-batch among them (the `cp_group` of `cp_size`). Ranks that compute a pass together, by either of the
two, train on one *share* of a batch. Rank 0 of each `tp_group` talks to the server. Every rank ends a phase with its
outcome: all succeed, or all raise the same error.

May import: torch, `bridge.core`, `bridge.errors`. No other package calls torch.distributed.
"""
