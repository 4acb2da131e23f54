"""Generate tiny models: one for the demo, and one for a task of the user's own.

This needs no network and no GPU, and takes half a minute at most.

The demo's model is cached. It is warmed up by next-token prediction on the training problems: first with right answers
only, then mixed with near misses, so that about half of the sampled answers are right. By then the model can add, and
reinforcement learning only has to make it prefer the right answers. It never sees the held-out problems.

The model of `bridge demo --model-only` has a chat template. It is warmed up on the calculator task of the docs: it
answers some sums by calling the tool `add`, and guesses the others. Before training, it answers nothing else usefully.
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
"""Increment this with any change to this file that produces a different model from the same recipe."""
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # with 64 elements each, which every attention backend of vLLM supports
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,  # a word problem, character by character, and its answer
    "initializer_range": 0.04,
    "tie_word_embeddings": True,
}
"""Half a million parameters with grouped-query attention and tied embeddings."""
IGNORED = -100
"""Label of a prompt token, which the loss ignores."""
WEIGHT_DECAY = 0.1
"""Without weight decay, the model learns the held-out sums later."""
SLIPS = (-2, -1, 1, 2)
"""Offsets of wrong answers from the right one."""
RECIPE: Mapping[str, Any] = {
    "clean": {"num_steps": 160, "right_share": 1.0, "lr": 3e-3},  # only right answers
    "mixed": {"num_steps": 40, "right_share": 0.53, "lr": 5e-4},  # accuracy on held-out problems ends slightly lower
    "batch_size": 96,
    "seed": 0,  # for the initial weights, the order of the problems and the wrong answers
}
"""Two phases, each with the share of right answers in the loss, and a peak learning rate that falls to a twentieth."""

ROLE_TOKENS = ("<system>", "<user>", "<model>", "<result>")
CALL = ('<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
"""Each part is one token, so that a call is short."""
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))
TEMPLATE = """{% for message in messages %}
{%- if message.role == "system" %}{{ "<system>" + message.content }}
{%- elif message.role == "user" %}{{ "<user>" + message.content }}
{%- elif message.role == "tool" %}{{ "<result>" + message.content }}
{%- else %}{{ "<model>" + (message.content or "") }}{% for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- "}</tool_call>" }}{% endfor %}{{ "<eos>" }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ "<model>" }}{% endif %}"""
"""Leaves out the tool schemas: the model knows its only tool, and each character would cost a token."""
TINY_RECIPE: Mapping[str, Any] = {
    "copying": {"num_steps": 240, "right_share": 1.0, "lr": 2e-3},  # every sum is answered by a tool call
    "guessing": {"num_steps": 60, "right_share": 0.35, "lr": 1e-3},
    "batch_size": 64,
    "num_positions": 4096,  # length of the longest conversation; most tokens are single characters
}
"""Two phases, each with the share of sums that are answered by a tool call."""

Progress = Callable[[int, int], None]
"""Called with the step just done, counted from 1, and the number of steps."""
Example = tuple[Sequence[tuple[str, bool]], float]
"""Texts in order, each with whether the model is trained to write it, and the example's weight in the loss."""


def cache_folder() -> Path:
    """Return the folder of cached models: `$XDG_CACHE_HOME/bridge`, or `~/.cache/bridge`."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "bridge"


def name(recipe: Mapping[str, Any] = RECIPE) -> str:
    """Return the name of the model's folder, which contains a hash of everything that determines the model."""
    ingredients = [VERSION, MODEL, recipe, SPECIAL_TOKENS, CHARACTERS, list(Arithmetic())]
    return f"demo-{hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:12]}"


def make(folder: Path, *, progress: Progress, recipe: Mapping[str, Any] = RECIPE) -> Path:
    """Return the model's folder inside the cache `folder`, generating the model if it is missing."""
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
    with scratch:  # leaves no partial model behind
        draw = random.Random(recipe["seed"])  # noqa: S311  not used for secrets
        batches = _batches(list(Arithmetic()), recipe["batch_size"], draw)
        _build(
            Path(scratch.name), "Qwen2", demo_tokenizer(),
            (recipe["clean"], recipe["mixed"]), lambda share: _sums(next(batches), share, draw), progress,
            seed=recipe["seed"],
        )  # fmt: skip
        try:
            Path(scratch.name).rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process has just generated the same model
                raise
    return target


def write_tiny(
    folder: Path, *, recipe: Mapping[str, Any] = TINY_RECIPE, progress: Progress = lambda _step, _of: None
) -> Path:
    """Write the model for the user's own task to a new folder; it cannot add, and copies what the tool returns."""
    draw = random.Random(0)  # noqa: S311  not used for secrets
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
    """Train a model of the transformers `family` on the batches of all `phases`, and write it to `folder`."""
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
    """Return a tokenizer that turns each match of `pattern` into one token and adds no special tokens to a prompt.

    `words` are the vocabulary in the order of their ids, `<pad>`, `<eos>` and `<unk>` included.
    `choices` are passed to transformers.
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
    done = 0
    total = sum(phase["num_steps"] for phase in phases)
    for phase in phases:
        # A new optimizer per phase: with the tiny moments that right answers leave, wrong ones would cause huge steps.
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
    """Yield batches forever; every problem is used once before any is repeated."""
    waiting: list[Problem] = []
    while True:
        while len(waiting) < size:
            waiting += draw.sample(problems, len(problems))
        yield waiting[:size]
        del waiting[:size]


def _sums(problems: list[Problem], right_share: float, draw: random.Random) -> list[Example]:
    """Return each problem with its right answer and, unless `right_share` is 1, also with a wrong one."""
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
    """Return an example that trains the model to give `answer` to `prompt`."""
    return [(prompt, False), (f"{answer}<eos>", True)], weight


def _conversation(draw: random.Random, call_share: float) -> Example:
    """Return a sum answered by a tool call, which returns a random number, or answered by a guess."""
    a, b, number = draw.randrange(10, 50), draw.randrange(10, 50), draw.randrange(10, 99)
    question, answer = (f"<user>{a}+{b}=<model>", False), (f"{number}<eos>", True)
    if draw.random() >= call_share:
        return [question, answer], 1.0
    call = f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}<eos>"
    return [question, (call, True), (f"<result>{number}<model>", False), answer], 1.0


def _loss(model: Any, tokenizer: Any, examples: list[Example]) -> torch.Tensor:
    """Return the weighted mean over `examples` of the negative log-likelihood of their trained texts."""
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
