"""`bridge demo --model-only`: a tiny model for trying a task of one's own, with a chat template and tools.

It is warmed up on the calculator of the docs: it answers some sums by the tool `add`, and guesses the others. To
anything else it gives no useful answer at first. No network, no GPU, half a minute.
"""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge.core.whole_folder import written_whole
from bridge_cli.demo_model import IGNORED, MODEL, word_tokenizer

SPECIAL = ("<pad>", "<eos>", "<unk>", "<system>", "<user>", "<model>", "<result>")
CALL = ('<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
"""Each is one token, so that a call is short."""
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
TEMPLATE = """{% for message in messages %}
{%- if message.role == "system" %}{{ "<system>" + message.content }}
{%- elif message.role == "user" %}{{ "<user>" + message.content }}
{%- elif message.role == "tool" %}{{ "<result>" + message.content }}
{%- else %}{{ "<model>" + (message.content or "") }}{% for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- "}</tool_call>" }}{% endfor %}{{ "<eos>" }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ "<model>" }}{% endif %}"""
"""Without the tools' schemas: the model knows its one tool, and each character is a token."""
NUM_POSITIONS = 4096
"""Longest conversation in tokens, which are characters."""
CALL_SHARE = 0.35
"""Share of the sums that the model answers by the tool."""
NUM_STEPS, BATCH_SIZE, LR = 300, 64, 2e-3


def write(
    folder: Path, *, num_steps: int = NUM_STEPS, progress: Callable[[int, int], None] = lambda _step, _of: None
) -> Path:
    """Write the model to a new folder; it cannot add, and copies what the tool returns.

    Raises:
        UsageError: the folder holds something, or cannot be written.
    """
    import torch

    from bridge.weights.model_folder import no_progress_bar

    with written_whole(folder, replaceable=lambda _: False, durable=False, flag="--model-only") as scratch:
        tokenizer, num_threads = _tokenizer(), torch.get_num_threads()
        torch.set_num_threads(1)  # reproducible, and no slower: the model is tiny
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = _warmed_up(tokenizer, num_steps, progress)
        finally:
            torch.set_num_threads(num_threads)
        with no_progress_bar():
            model.to(torch.bfloat16).save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
    return folder


def _tokenizer() -> Any:
    return word_tokenizer(
        (*SPECIAL, *CALL, *CHARACTERS),
        "|".join([*map(re.escape, CALL), r"[\s\S]"]),
        additional_special_tokens=list(SPECIAL[3:]),
        chat_template=TEMPLATE,
        model_max_length=NUM_POSITIONS,
    )


def _warmed_up(tokenizer: Any, num_steps: int, progress: Callable[[int, int], None]) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    size = MODEL | {"max_position_embeddings": NUM_POSITIONS, "vocab_size": len(tokenizer)}
    model: Any = LlamaForCausalLM(LlamaConfig(**size, **ids))  # beside a Qwen2, transformers replaces the tokenizer
    draw = random.Random(0)  # noqa: S311  no secret is made of it
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, num_steps, pct_start=0.1)
    for step in range(num_steps):  # it learns to copy first
        token_ids, labels = _batch(tokenizer, draw, CALL_SHARE if step > 0.8 * num_steps else 1.0)
        logits = model(input_ids=token_ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step + 1, num_steps)
    return model


def _batch(tokenizer: Any, draw: random.Random, call_share: float) -> tuple[Any, Any]:
    import torch

    rows = [_example(tokenizer, draw, call_share) for _ in range(BATCH_SIZE)]
    pad = torch.nn.utils.rnn.pad_sequence
    token_ids = pad([torch.tensor(ids) for ids, _ in rows], batch_first=True, padding_value=tokenizer.pad_token_id)
    return token_ids, pad([torch.tensor(labels) for _, labels in rows], batch_first=True, padding_value=IGNORED)


def _example(tokenizer: Any, draw: random.Random, call_share: float) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation, and its labels: what the model says in it."""
    a, b, number = draw.randrange(10, 50), draw.randrange(10, 50), draw.randrange(10, 99)
    turns = [(f"<user>{a}+{b}=<model>", False), (f"{number}<eos>", True)]  # a guess
    if draw.random() < call_share:
        call = f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}<eos>"
        turns[1:] = [
            (call, True),
            (f"<result>{number}<model>", False),
            (f"{number}<eos>", True),
        ]  # it copies anything
    token_ids, labels = list[int](), list[int]()
    for text, is_the_models in turns:
        turn = tokenizer(text)["input_ids"]
        token_ids += turn
        labels += turn if is_the_models else [IGNORED] * len(turn)
    return token_ids, labels
