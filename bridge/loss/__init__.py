"""What is minimised: advantages, the policy loss, importance weights, and the reference of a KL divergence.

Words: *advantage* (a reward against its group), *ratio* (of a token's or a completion's probabilities, now to before
the batch), *mismatch* (of two engines' log-probabilities), *reference* (a frozen model that the policy is to stay
near).
May import: torch, `bridge.config`, `bridge.types`, `bridge.passes`; the reference alone loads models
(`bridge.weights`).
"""
