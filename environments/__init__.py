"""Environments: tasks with problems to iterate over and a score for each completion.

Words: an *environment* is named on the command line, `arithmetic` or `file.py:ClassName`; a *problem* is what is
asked, its *held-out* problems are kept from training, its *score* is the reward of one completion.

May import: `bridge.types`, `bridge.errors` and `bridge.rewards`, all of them plain; neither torch, vLLM,
`patches` nor `cli`.
"""
