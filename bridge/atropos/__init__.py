"""Atropos: environments in other processes push rollouts into a queue, the *API*, from which a trainer takes them.

Terms: *API* (atroposlib's `run-api`), *group* (scored sequences for one problem), *batch* (groups with as many
sequences in total as one step needs), *mask* (marks the tokens of a sequence that the model sampled).
May import: `bridge.rollouts`, `bridge.scoring`, `bridge.server`, `bridge.config`, `bridge.weights`, `bridge.core`.
"""
