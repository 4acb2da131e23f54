"""Atropos: environments in other processes push rollouts into a queue, the *API*, and a trainer takes them out.

Words: *API* (`run-api` of atroposlib), *group* (scored sequences of one problem), *batch* (groups that add up to the
sequences of one step), *mask* (which tokens of a sequence the model sampled).
May import: `bridge.rollouts`, `bridge.scoring`, `bridge.server`, `bridge.config`, `bridge.weights`, `bridge.core`.
"""
