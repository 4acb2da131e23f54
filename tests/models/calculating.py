"""A tiny model that sometimes adds by a tool, and guesses otherwise: half a million parameters."""

import random
import re
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from cli.demo_model import MODEL

SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<model>", "<result>")
CALL = ('<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
"""Each is one token, so that a call is short."""
TEMPLATE = """{% for message in messages %}
{%- if message.role == "user" %}{{ "<user>" + message.content }}
{%- elif message.role == "tool" %}{{ "<result>" + message.content }}
{%- else %}{{ "<model>" + message.content }}{% for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- "}</tool_call>" }}{% endfor %}{{ "<eos>" }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ "<model>" }}{% endif %}"""
"""Without the tools' schemas, for brevity: the model knows its one tool."""
CALL_SHARE = 0.35
"""Share of the prompts that the model answers by the tool."""
IGNORED = -100


def write(folder: Path, *, num_steps: int = 300, batch_size: int = 64) -> Path:
    """Write the model to `folder`; it cannot add, and copies what the tool returns."""
    tokenizer = _tokenizer()
    torch.manual_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    model: Any = Qwen2ForCausalLM(
        Qwen2Config(**MODEL | {"max_position_embeddings": 2048}, **ids, vocab_size=len(tokenizer))
    )
    draw = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, num_steps, pct_start=0.1)
    for step in range(num_steps):  # it learns to copy first
        token_ids, labels = _batch(tokenizer, batch_size, draw, CALL_SHARE if step > 0.8 * num_steps else 1.0)
        logits = model(input_ids=token_ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    words = [*SPECIAL, *CALL, *"0123456789+="]
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*map(re.escape, CALL), "."])), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[3:]),
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _batch(tokenizer: Any, size: int, draw: random.Random, call_share: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [_example(tokenizer, draw, call_share) for _ in range(size)]
    pad = torch.nn.utils.rnn.pad_sequence
    token_ids = pad([torch.tensor(ids) for ids, _ in rows], batch_first=True, padding_value=tokenizer.pad_token_id)
    return token_ids, pad([torch.tensor(labels) for _, labels in rows], batch_first=True, padding_value=IGNORED)


def _example(tokenizer: Any, draw: random.Random, call_share: float) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation, and its labels: what the model says in it."""
    a, b, number = draw.randrange(10, 50), draw.randrange(10, 50), draw.randrange(10, 99)
    turns = [(f"<user>{a}+{b}=<model>", False), (f"{number}<eos>", True)]  # a guess
    if draw.random() < call_share:
        said = f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}<eos>"
        turns[1:] = [
            (said, True),
            (f"<result>{number}<model>", False),
            (f"{number}<eos>", True),
        ]  # it copies anything
    ids, labels = list[int](), list[int]()
    for text, is_said in turns:
        found = tokenizer(text)["input_ids"]
        ids += found
        labels += found if is_said else [IGNORED] * len(found)
    return ids, labels
