"""Training: from rollouts to one optimizer step on weights that somebody else also reads.

Words: *advantage* (a reward against its group), *micro-batch* (what one forward and backward pass holds),
*master* (the float32 value of a weight, half of it the weight itself), *checkpoint* (a plain Hugging Face folder).

May import: `bridge`'s plain types and errors, torch, transformers; of Bridge nothing that knows a server or a mode
except in `loop.py`.
"""
