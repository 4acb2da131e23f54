"""Environments: problems to train on and a score for each completion.

Terms: an *environment* is named on the command line (`arithmetic`, `word_problems`, `gsm8k`, `jsonl`,
`file.py:ClassName`, or of another package: `verifiers:ID`, `reasoning_gym:TASK`); *held-out* problems are kept for
evaluation; a *score* is the reward of one completion; *rows* are data from which problems are made; weighted *rewards*
(`--reward`) may replace the score; *tools* are methods of a class that the model calls. Scores and tools are called by
`bridge/scoring`.

May import: `bridge.config`, `bridge.scoring`, `bridge.agents.tools`, `bridge.core`, `bridge.types`, `bridge.errors`;
neither torch nor vLLM.
`datasets`, `math_verify` and `reasoning_gym` are imported where they are needed, and verifiers in another Python.
"""
