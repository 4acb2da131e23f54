"""Environments: problems to train on and a score for each completion.

Words: an *environment* is named on the command line (`arithmetic`, `gsm8k`, `jsonl` or `file.py:ClassName`); *held-out*
problems are kept for evaluation; a *score* is the reward of one completion; *rows* are data before they become
problems; weighted *rewards* (`--reward`) may replace the score. Scores are called by `bridge/scoring`.

May import: `bridge.config`, `bridge.scoring`, `bridge.core`, `bridge.types`, `bridge.errors`; neither torch nor vLLM.
`datasets` and `math_verify` are imported where they are needed.
"""
