"""Atropos: rollouts that environments of other processes push into a queue, the *API*, and a trainer takes out.

Words: *API* (the queue between the two, `run-api` of atroposlib), *group* (scored sequences of one problem), *batch*
(groups that add up to the sequences of one step), *mask* (which tokens of a sequence the model sampled).
May import: `bridge.rollouts`, `bridge.scoring`, `bridge.server`, `bridge.config`, `bridge.weights`.
"""
