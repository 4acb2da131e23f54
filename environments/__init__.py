"""Environments: tasks with problems to iterate over and a score for each completion.

Words: an *environment* is named on the command line, `arithmetic`, `gsm8k`, `jsonl` or `file.py:ClassName`; a *problem*
is what is asked, its *held-out* problems are kept from training, its *score* is the reward of one completion; *rows*
are data before they become problems; several *rewards* with weights may take the place of the score.

May import: `bridge.config`, `bridge.scoring`, `bridge.core`, `bridge.types`, `bridge.errors`: neither torch nor vLLM.
`datasets` and `math_verify` are imported where they are needed.
"""
