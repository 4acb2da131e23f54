"""From groups to updates: advantages, samples and losses.

Terms: *sample* (a completion to train on), *step* (one batch), *update* (one optimizer step), *epoch* (one pass over a
batch), *mini-batch* (the samples of one update), *micro-batch* (the samples of one forward and backward pass).
May import: `bridge.passes`, `bridge.optimizers`, `bridge.weights`, `bridge.config`.
"""
