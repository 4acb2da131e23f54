"""Make the demo's tiny model and its tokenizer: no network, no GPU, half a minute at most, cached.

Not covered: how it learns to add, badly (`warm_up.py`), and running the demo.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bridge.errors import UsageError
from cli.warm_up import Progress, Recipe, warm_up
from environments.arithmetic import Arithmetic

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+="

VERSION = 1
"""Raised with any change to this file or `warm_up.py` that makes another model of the same recipe."""
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


def cache_folder() -> Path:
    """Return where made models are kept: `$XDG_CACHE_HOME/bridge`, else `~/.cache/bridge`."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "bridge"


def make(folder: Path, *, progress: Progress, recipe: Recipe | None = None) -> Path:
    """Return the model's folder inside the cache `folder`; make it first unless it is there.

    Raises:
        UsageError: `folder` cannot be written.
    """
    recipe = recipe if recipe is not None else Recipe()
    target = folder / f"demo-{_key(recipe)}"
    if not target.is_dir():
        with _appears_whole(target) as unfinished:
            _build(unfinished, recipe, progress)
    return target


def _key(recipe: Recipe) -> str:
    ingredients = [VERSION, MODEL, asdict(recipe), SPECIAL_TOKENS, CHARACTERS, list(Arithmetic())]
    return hashlib.sha256(json.dumps(ingredients).encode()).hexdigest()[:12]


@contextmanager
def _appears_whole(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `target` at the end; whatever goes wrong, none is left half done."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise UsageError(
            f"cannot write the demo's model below {target.parent}: {error.strerror}",
            remedy="XDG_CACHE_HOME=/a/folder/of/yours bridge demo",
        ) from error
    try:
        yield unfinished
        _rename(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _rename(unfinished: Path, target: Path) -> None:
    try:
        unfinished.rename(target)
    except OSError:
        if not target.is_dir():  # else another process made the same model meanwhile, which serves as well
            raise


def _build(folder: Path, recipe: Recipe, progress: Progress) -> None:
    import torch

    from bridge.weights.model_folder import no_progress_bar

    tokenizer = _tokenizer()
    with _reproducible(recipe.seed):
        model = _model(tokenizer)
        warm_up(model, tokenizer, Arithmetic(), recipe, progress)
    with no_progress_bar():
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Seed torch and keep it on one thread: a tiny model gains nothing from more, and loses much on a busy machine."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(num_threads)


def _tokenizer() -> Any:
    """Make a tokenizer of one token per character, which adds none of its own to a prompt."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=MODEL["max_position_embeddings"],
    )


def _model(tokenizer: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            **MODEL,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
