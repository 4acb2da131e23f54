"""A tiny model with random weights, each of whose tokens is a complete answer, a tool call, or the end of the turn."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bridge_cli.demo_model import ROLE_TOKENS, SPECIAL_TOKENS, TEMPLATE, word_tokenizer
from tests.models import tiny

CALL = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
ANSWERS = tuple(f"<answer>{number}</answer>" for number in range(12))


def write(folder: Path, answers: Sequence[str] = ANSWERS) -> Path:
    """Write the model to `folder`; its tokenizer maps any other text to an unknown token."""
    torch.manual_seed(0)
    words = (*SPECIAL_TOKENS, *ROLE_TOKENS, CALL, *answers)
    config = tiny.llama(len(words))
    config.eos_token_id, config.initializer_range = words.index("<eos>"), 0.08
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    pattern = "|".join([*map(re.escape, words), "[^<]+", "<"])
    special = list(ROLE_TOKENS)
    tokenizer = word_tokenizer(words, pattern, additional_special_tokens=special, chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    return folder
