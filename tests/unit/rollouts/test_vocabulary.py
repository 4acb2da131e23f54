"""The tokens of a model: their texts, those that end a completion, and those without an embedding."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerBase

from bridge.errors import RejectedRequestError, UsageError
from bridge.rollouts.openai_api import ids_by_text
from bridge.rollouts.vocabulary import Vocabulary
from bridge.weights import skeleton
from tests.models import chat, tiny


class Counting:
    """A vocabulary of a word, two halves of one character, and a word again; counts calls."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def __len__(self) -> int:
        return 4

    def decode(self, ids: list[int], **_: Any) -> str:
        self.num_decoded += 1
        return [" a", "\ufffd", "\ufffd", "a"][ids[0]]


def test_every_token_is_found_by_its_text(tmp_path: Path) -> None:
    tokenizer = skeleton.tokenizer(str(tiny.write(tiny.llama(), tmp_path / "model")))
    ids_of = ids_by_text(tokenizer)
    assert [ids_of(tokenizer.decode([token_id])) for token_id in range(tiny.VOCABULARY)] == [
        (token_id,) for token_id in range(tiny.VOCABULARY)
    ]


@pytest.mark.parametrize(("text", "ids"), [(" a", (0,)), ("a", (3,)), ("\ufffd", (1, 2)), ("b", ()), ("", ())])
def test_text_can_match_one_several_or_no_tokens(text: str, ids: tuple[int, ...]) -> None:
    assert ids_by_text(Counting())(text) == ids


def test_vocabulary_is_decoded_once_at_the_first_lookup() -> None:
    tokenizer = Counting()
    ids_of = ids_by_text(tokenizer)
    assert tokenizer.num_decoded == 0
    for text in ("a", "b", " a"):
        ids_of(text)
    assert tokenizer.num_decoded == 4


def test_chats_end_where_either_named_template_ends_a_turn(tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "llama3")
    end = "<|eot_id|>"
    tokenizer.chat_template = {"default": chat.template("llama3"), "tool_use": chat.template("qwen2_5")}
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (end, "<|im_end|>")]
    assert Vocabulary.of(tokenizer, str(tmp_path)).end_ids == (ids[1],), "the server stops at the other one"
    tokenizer.eos_token = "</s>"
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(tmp_path)
    found = Vocabulary.of(tokenizer, str(tmp_path))
    assert (found.end_of_turn, found.end_ids) == (end, tuple(ids))
    lines = [*found.remarks(tokenizer, "m")]
    assert [line.partition(", which")[0] for line in lines] == [
        f"the chat template of m ends a turn with '{token}'" for token in (end, "<|im_end|>")
    ]


def base(folder: Path, *, missing: int = 0) -> PreTrainedTokenizerBase:
    """Write a model with Qwen 2.5's template, a different EOS, like Qwen's base models, and too few embeddings."""
    tokenizer = chat.tokenizer(folder, "qwen2_5")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    tiny.qwen2(len(tokenizer) - missing).save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return tokenizer


def test_completions_of_chat_messages_end_at_the_end_of_a_turn(tmp_path: Path) -> None:
    tokenizer = base(tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ours = Vocabulary.of(tokenizer, str(tmp_path))
    assert (ours.end_of_turn, ours.end_id, ours.end_ids) == ("<|im_end|>", end, (end,))
    (line,) = ours.remarks(tokenizer, "m")
    assert "ends a turn with '<|im_end|>', which is not an end-of-sequence token of the model" in line
    assert f"add {end} to eos_token_id in its generation_config.json" in line
    GenerationConfig(eos_token_id=[tokenizer.eos_token_id, end]).save_pretrained(tmp_path)
    known = Vocabulary.of(tokenizer, str(tmp_path))
    assert (known.end_id, known.end_ids, [*known.remarks(tokenizer, "m")]) == (end, (), [])


def test_template_without_an_end_of_turn_is_reported(tmp_path: Path) -> None:
    tokenizer = base(tmp_path)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    ours = Vocabulary.of(tokenizer, str(tmp_path))
    assert (ours.end_id, ours.end_ids) == (None, ())
    (line,) = ours.remarks(tokenizer, "m")
    assert "does not end a turn with a special token: a completion ends at <|endoftext|> or at --max-new-" in line


def test_special_token_that_ends_a_thought_is_reported(tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "qwen3")
    assert not [*Vocabulary.of(tokenizer, str(tmp_path)).remarks(tokenizer, "m")]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    (line,) = Vocabulary.of(tokenizer, str(tmp_path)).remarks(tokenizer, "m")
    assert line.startswith("</think> is a special token of m, and the text of a completion has none: a reward, such")


def test_tokens_without_an_embedding_are_counted_and_refused(tmp_path: Path) -> None:
    tokenizer = base(tmp_path, missing=3)
    num_embeddings = len(tokenizer) - 3
    ours = Vocabulary.of(tokenizer, str(tmp_path))
    assert ours.num_embeddings == num_embeddings
    first = f"</tool_call>' ({num_embeddings})"
    assert ours.beyond(tokenizer).startswith(f"3 tokens of the tokenizer are beyond the model's {num_embeddings} emb")
    assert ours.beyond(tokenizer).endswith(first)
    ours.check_ids([0, num_embeddings - 1], lambda: "the prompt")
    with pytest.raises(RejectedRequestError, match=f"token {num_embeddings} of the prompt is beyond the model's"):
        ours.check_ids([0, num_embeddings], lambda: "the prompt")
    assert Vocabulary.of(base(tmp_path), str(tmp_path)).beyond(tokenizer) == ""


def test_stop_string_with_a_special_token_is_refused(tmp_path: Path) -> None:
    ours = Vocabulary.of(base(tmp_path), str(tmp_path))
    ours.check_stop(["</think>", "\n\n", "<|im_end|>"])
    with pytest.raises(UsageError, match=r"--stop '<\|im_end\|>.*' never ends a completion: <\|im_end\|> is a spe"):
        ours.check_stop(["<|im_end|>\n"])


def test_vocabulary_works_without_a_model_configuration(tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5")
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "of_its_own_code"}')
    ours = Vocabulary.of(tokenizer, str(tmp_path))
    assert (ours.end_of_turn, ours.end_ids, ours.num_embeddings) == ("<|im_end|>", (), None)
    assert ours.beyond(tokenizer) == ""
