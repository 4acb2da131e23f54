"""Make tiny models: the demo's, and one for a task of the user's own; no network, no GPU, half a minute at most.

The demo's is cached. It is warmed up by next-token prediction on the training problems: first with right answers, then
with some wrong ones near the right one, so that about every second sampled answer is right. By then the model can add,
and reinforcement learning has to prefer what it knows, not to discover it. The held-out problems stay new to it.

That of `bridge demo --model-only` has a chat template. It is warmed up on the calculator of the docs: it answers some
sums by the tool `add`, and guesses the others. To anything else it gives no useful answer at first.
"""

import hashlib
import json
import math
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from bridge.core import atomic_folder
from bridge.errors import UsageError
from bridge.types import Problem
from bridge.weights.model_folder import no_progress_bar
from bridge_environments.registry import Arithmetic

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+="
VERSION = 1
"""Raised with any change to this file that makes another model of the same recipe."""
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 64 elements, which every attention of vLLM supports
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,  # a word problem, character by character, and its answer
    "initializer_range": 0.04,
    "tie_word_embeddings": True,
}
"""Half a million parameters with grouped-query attention and tied embeddings."""
IGNORED = -100
"""Label of a token of the prompt."""
WEIGHT_DECAY = 0.1
"""Without it the held-out sums are learnt later."""
SLIPS = (-2, -1, 1, 2)
"""How far a wrong answer is from the right one."""
RECIPE: Mapping[str, Any] = {
    "clean": {"num_steps": 160, "right_share": 1.0, "lr": 3e-3},  # only right answers
    "mixed": {"num_steps": 40, "right_share": 0.53, "lr": 5e-4},  # held-out problems end a little below this share
    "batch_size": 96,
    "seed": 0,  # of the initial weights, the order of the problems and the wrong answers
}
"""Two phases, each with the share of right answers in the loss, and a peak learning rate that falls to a twentieth."""

ROLE_TOKENS = ("<system>", "<user>", "<model>", "<result>")
CALL = ('<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
"""Each is one token, so that a call is short."""
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))
TEMPLATE = """{% for message in messages %}
{%- if message.role == "system" %}{{ "<system>" + message.content }}
{%- elif message.role == "user" %}{{ "<user>" + message.content }}
{%- elif message.role == "tool" %}{{ "<result>" + message.content }}
{%- else %}{{ "<model>" + (message.content or "") }}{% for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- "}</tool_call>" }}{% endfor %}{{ "<eos>" }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ "<model>" }}{% endif %}"""
"""Without the tools' schemas: the model knows its one tool, and each character is a token."""
TINY_RECIPE: Mapping[str, Any] = {
    "copying": {"num_steps": 240, "right_share": 1.0, "lr": 2e-3},  # every sum is answered by the tool
    "guessing": {"num_steps": 60, "right_share": 0.35, "lr": 1e-3},
    "batch_size": 64,
    "num_positions": 4096,  # of the longest conversation, whose tokens are characters
}
"""Two phases, each with the share of sums that are answered by the tool."""

Progress = Callable[[int, int], None]
"""Called with the step just done, counted from 1, and the number of steps."""
Example = tuple[Sequence[tuple[str, bool]], float]
"""Texts in order, each with whether the model learns to write it, and their weight in the loss."""


def cache_folder() -> Path:
    """Return where models are kept: `$XDG_CACHE_HOME/bridge`, else `~/.cache/bridge`."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "bridge"


def name(recipe: Mapping[str, Any] = RECIPE) -> str:
    """Return the name of the model's folder, which has a hash of what it is made of."""
    ingredients = [VERSION, MODEL, recipe, SPECIAL_TOKENS, CHARACTERS, list(Arithmetic())]
    return f"demo-{hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:12]}"


def make(folder: Path, *, progress: Progress, recipe: Mapping[str, Any] = RECIPE) -> Path:
    """Return the model's folder inside the cache `folder`; make it first unless it is there."""
    target = folder / name(recipe)
    if target.is_dir():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=folder, prefix=f".{target.name}.", ignore_cleanup_errors=True)
    except OSError as error:
        raise UsageError(
            f"cannot write the demo's model to {folder}: {error.strerror}",
            hint="XDG_CACHE_HOME=/a/writable/folder bridge demo",
        ) from error
    with scratch:  # whatever goes wrong, no half of the model is left
        draw = random.Random(recipe["seed"])  # noqa: S311  no secret is made of it
        batches = _batches(list(Arithmetic()), recipe["batch_size"], draw)
        _build(
            Path(scratch.name), "Qwen2", demo_tokenizer(),
            (recipe["clean"], recipe["mixed"]), lambda share: _sums(next(batches), share, draw), progress,
            seed=recipe["seed"],
        )  # fmt: skip
        try:
            Path(scratch.name).rename(target)
        except OSError:
            if not target.is_dir():  # else another process made the same model meanwhile
                raise
    return target


def write_tiny(
    folder: Path, *, recipe: Mapping[str, Any] = TINY_RECIPE, progress: Progress = lambda _step, _of: None
) -> Path:
    """Write the model for a task of the user's own to a new folder; it cannot add, and copies what the tool returns."""
    draw = random.Random(0)  # noqa: S311  no secret is made of it
    tokenizer = word_tokenizer(
        (*SPECIAL_TOKENS, *ROLE_TOKENS, *CALL, *PRINTABLE), "|".join([*map(re.escape, CALL), r"[\s\S]"]),
        model_max_length=recipe["num_positions"], additional_special_tokens=list(ROLE_TOKENS), chat_template=TEMPLATE,
    )  # fmt: skip
    with atomic_folder.write(folder, replaceable=lambda _: False, durable=False, flag="--model-only") as scratch:
        _build(
            scratch, "Llama", tokenizer, (recipe["copying"], recipe["guessing"]),
            lambda share: [_conversation(draw, share) for _ in range(recipe["batch_size"])], progress,
            max_position_embeddings=recipe["num_positions"],
        )  # fmt: skip
    return folder


def _build(
    folder: Path,
    family: str,
    tokenizer: Any,
    phases: Sequence[Mapping[str, Any]],
    batch: Callable[[float], list[Example]],
    progress: Progress,
    *,
    seed: int = 0,
    **size: int,
) -> None:
    """Train a model of a `family` of transformers on the batches of the `phases`, and write it to `folder`."""
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = getattr(transformers, f"{family}Config")(**MODEL | size, **ids, vocab_size=len(tokenizer))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # reproducible, and no slower: the model is tiny
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
            _warm_up(model, tokenizer, phases, batch, progress)
    finally:
        torch.set_num_threads(num_threads)
    with no_progress_bar():
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def word_tokenizer(words: Sequence[str], pattern: str, **choices: Any) -> Any:
    """Return a tokenizer in which each match of `pattern` is one token, and which adds none to a prompt.

    `words` are the vocabulary in the order of their ids, `<pad>`, `<eos>` and `<unk>` included.
    `choices` go to transformers.
    """
    vocabulary = {word: index for index, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    inner.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, **special, clean_up_tokenization_spaces=False, **choices
    )


def demo_tokenizer() -> Any:
    return word_tokenizer((*SPECIAL_TOKENS, *CHARACTERS), ".", model_max_length=MODEL["max_position_embeddings"])


def _warm_up(
    model: Any,
    tokenizer: Any,
    phases: Sequence[Mapping[str, Any]],
    batch: Callable[[float], list[Example]],
    progress: Progress,
) -> None:
    done, total = 0, sum(phase["num_steps"] for phase in phases)
    for phase in phases:
        # A new optimizer: after right answers the moments are tiny, and the first wrong ones would make huge steps.
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
        for step in range(phase["num_steps"]):
            examples = batch(phase["right_share"])
            cosine = 0.5 * (1 + math.cos(math.pi * step / phase["num_steps"]))
            optimizer.param_groups[0]["lr"] = phase["lr"] * min(1.0, (step + 1) / 10) * (0.05 + 0.95 * cosine)
            optimizer.zero_grad()
            _loss(model, tokenizer, examples).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            done += 1
            progress(done, total)


def _batches(problems: list[Problem], size: int, draw: random.Random) -> Iterator[list[Problem]]:
    """Yield batches forever; every problem comes once before any comes again."""
    waiting: list[Problem] = []
    while True:
        while len(waiting) < size:
            waiting += draw.sample(problems, len(problems))
        yield waiting[:size]
        del waiting[:size]


def _sums(problems: list[Problem], right_share: float, draw: random.Random) -> list[Example]:
    """Pair every problem with its right answer and, unless the right ones have all the weight, a wrong one."""
    right = [answered(str(problem["prompt"]), str(problem["answer"]), right_share) for problem in problems]
    if right_share == 1.0:
        return right
    wrong = []
    for problem in problems:
        near = [int(problem["answer"]) + slip for slip in SLIPS]
        answer = str(draw.choice([number for number in near if number >= 0]))
        wrong.append(answered(str(problem["prompt"]), answer, 1 - right_share))
    return right + wrong


def answered(prompt: str, answer: str, weight: float = 1.0) -> Example:
    """Return the example of a prompt and an answer to it."""
    return [(prompt, False), (f"{answer}<eos>", True)], weight


def _conversation(draw: random.Random, call_share: float) -> Example:
    """Return a sum that is answered by the tool, whose result is any number, or else a guess."""
    a, b, number = draw.randrange(10, 50), draw.randrange(10, 50), draw.randrange(10, 99)
    question, answer = (f"<user>{a}+{b}=<model>", False), (f"{number}<eos>", True)
    if draw.random() >= call_share:
        return [question, answer], 1.0
    call = f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}<eos>"
    return [question, (call, True), (f"<result>{number}<model>", False), answer], 1.0


def _loss(model: Any, tokenizer: Any, examples: list[Example]) -> torch.Tensor:
    """Return the weighted negative log-likelihood of what the model learns to write, per unit of weight."""
    rows, labels = [], []
    for texts, _ in examples:
        turns = [(tokenizer(text)["input_ids"], learned) for text, learned in texts]
        rows.append(torch.tensor([token for ids, _ in turns for token in ids]))
        labels.append(torch.tensor([token if learned else IGNORED for ids, learned in turns for token in ids]))
    pad = torch.nn.utils.rnn.pad_sequence  # on the right, where causal attention never looks
    token_ids = pad(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    targets = pad(labels, batch_first=True, padding_value=IGNORED)[:, 1:]
    weights = torch.tensor([weight for _, weight in examples])
    logits = model(input_ids=token_ids).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return (losses.sum(1) * weights).sum() / weights.sum()
