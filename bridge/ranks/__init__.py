"""Several processes that train replicas of one model in lockstep, each replica with its own server.

Terms are torch's: a *rank* is one of `world_size` processes. The ranks of one server split its weights by tensor
parallelism (`tp_rank` of `tp_size`, the `tp_group`); the servers are data-parallel replicas (`dp_rank` of `dp_size`).
Ranks with the same part of the weights share an optimizer (the `dp_group`). With context parallelism, replicas split
the tokens of each micro-batch (the `cp_group` of `cp_size`). Ranks that compute a pass together, through tensor or
context parallelism, train on one *share* of a batch. Rank 0 of each `tp_group` calls the server. At the end of a phase,
the ranks exchange their outcomes: all succeed, or all raise the same error.

May import: torch, `bridge.core`, `bridge.errors`. No other package calls torch.distributed.
"""
