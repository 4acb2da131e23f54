"""Rows as token ids: which tokens are trained on in the chat templates of real models, and what is refused."""

from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from bridge.errors import RewardError
from bridge.rollouts import problems
from bridge.rollouts.training_rows import RowEncoder, TrainingRow, digest
from tests.models import chat

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "2+3?"}
ANSWERED = {"role": "assistant", "content": "The answer is 5."}
AGAIN = {"role": "user", "content": "7+12?"}
LAST = {"role": "assistant", "content": "It is 19."}
OTHER = {"role": "assistant", "content": "It is 20."}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 12, "b": 7}}}
]}  # fmt: skip
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "19"}


def encoder(folder: Path, name: str, **template: Any) -> tuple[RowEncoder, PreTrainedTokenizerBase]:
    tokenizer = chat.tokenizer(folder, name)
    return RowEncoder(tokenizer, template, tokenizer.eos_token_id), tokenizer


def trained(row: TrainingRow, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return for each completion the text of its tokens that are trained on."""
    return [str(tokenizer.decode([*compress(ids, flags)])) for ids, flags in row.completions]


TEMPLATES = {
    "qwen2_5": "<|im_end|>", "qwen3_instruct_2507": "<|im_end|>", "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
}  # fmt: skip


@pytest.mark.parametrize(("name", "end"), TEMPLATES.items())
def test_every_turn_of_the_assistant_is_trained_with_its_end(tmp_path: Path, name: str, end: str) -> None:
    ours, tokenizer = encoder(tmp_path, name)
    row = ours.supervised({"messages": [SYSTEM, ASKED, ANSWERED, AGAIN, LAST]})
    assert trained(row, tokenizer) == [f"The answer is 5.{end}It is 19.{end}"]


@pytest.mark.parametrize(("name", "end"), TEMPLATES.items())
def test_prompt_is_the_one_that_a_run_samples_from(tmp_path: Path, name: str, end: str) -> None:
    ours, tokenizer = encoder(tmp_path, name)
    row = ours.supervised({"prompt": [ASKED, ANSWERED, AGAIN], "completion": [LAST]})
    assert tuple(row.prompt) == problems.encode(tokenizer, {"prompt": [ASKED, ANSWERED, AGAIN]})
    assert trained(row, tokenizer) == [f"It is 19.{end}"]
    assert row.group().completions[0].sampled is None


MARKED = ["qwen2_5", "qwen3_instruct_2507", "llama3", "gemma3"]


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("begin", [0, 3])
def test_found_tokens_are_those_that_a_marked_template_marks(tmp_path: Path, name: str, begin: int) -> None:
    """TRL marks the assistant's tokens in these templates; it also marks whitespace around a turn."""
    messages = [ASKED, ANSWERED, AGAIN, LAST]
    values = {"prompt": messages[:begin], "completion": messages[begin:]} if begin else {"messages": messages}
    ours, tokenizer = encoder(tmp_path / "plain", name)
    theirs, marked = encoder(tmp_path / "marked", f"{name}_training")
    (found,), (given,) = (
        trained(encode.supervised(values), words) for encode, words in ((ours, tokenizer), (theirs, marked))
    )
    assert "".join(found.split()) == "".join(given.split())


def test_calls_of_tools_are_trained_and_their_results_are_not(tmp_path: Path) -> None:
    ours, tokenizer = encoder(tmp_path, "qwen2_5")
    tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]
    row = ours.supervised({"messages": [ASKED, CALL, RESULT, LAST], "tools": tools})
    (text,) = trained(row, tokenizer)
    assert text.count('"name": "add"') == 1
    assert "<tool_response>" not in text
    assert text.endswith("It is 19.<|im_end|>")
    assert '"description": "Add."' in str(tokenizer.decode(row.prompt))


PAIRS: dict[str, dict[str, Any]] = {
    "with a prompt": {"prompt": [SYSTEM, ASKED, ANSWERED, AGAIN], "chosen": [LAST], "rejected": [OTHER]},
    "without a prompt": {
        "chosen": [SYSTEM, ASKED, ANSWERED, AGAIN, LAST], "rejected": [SYSTEM, ASKED, ANSWERED, AGAIN, OTHER],
    },
}  # fmt: skip


@pytest.mark.parametrize("form", PAIRS)
def test_pair_of_conversations_shares_its_prompt(tmp_path: Path, form: str) -> None:
    ours, tokenizer = encoder(tmp_path, "qwen2_5")
    row = ours.preference(PAIRS[form])
    assert tuple(row.prompt) == problems.encode(tokenizer, {"prompt": [SYSTEM, ASKED, ANSWERED, AGAIN]})
    assert trained(row, tokenizer) == ["It is 19.<|im_end|>", "It is 20.<|im_end|>"]
    group = row.group()
    assert group.advantages == ((1.0,), (-1.0,))
    assert group.rewards == ()


def test_texts_end_with_an_end_of_sequence_token(tmp_path: Path) -> None:
    ours, tokenizer = encoder(tmp_path, "qwen2_5")
    row = ours.supervised({"prompt": "2+3=", "completion": "5"})
    assert trained(row, tokenizer) == ["5<|im_end|>"]
    assert tuple(row.prompt) == tuple(problems.begun(tokenizer, "2+3="))
    again = ours.supervised({"prompt": "2+3=", "completion": "5<|im_end|>"})
    assert trained(again, tokenizer) == ["5<|im_end|>"]
    pair = ours.preference({"prompt": "2+3=", "chosen": "5", "rejected": "6"})
    assert trained(pair, tokenizer) == ["5<|im_end|>", "6<|im_end|>"]


def test_template_arguments_of_the_run_and_the_row_apply(tmp_path: Path) -> None:
    ours, tokenizer = encoder(tmp_path, "qwen3", enable_thinking=False)
    row = ours.supervised({"messages": [ASKED, ANSWERED]})
    assert str(tokenizer.decode(row.prompt)).endswith("<think>\n\n</think>\n\n")
    assert trained(row, tokenizer) == ["The answer is 5.<|im_end|>"]


THOUGHT = {"role": "assistant", "content": "<think>\nI add.\n</think>\n\n5"}
SFT_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a dropped system message": ("mistral", {"messages": [SYSTEM, ASKED, ANSWERED]}, "drops the message with the role"),
    "another role": (
        "qwen2_5", {"messages": [{"role": "critic", "content": "No."}, ASKED, ANSWERED]}, "drops the message with the",
    ),
    "a rewritten turn": ("qwen3", {"messages": [ASKED, THOUGHT, AGAIN, LAST]}, "drops or rewrites, such as a thought"),
    "a turn that later ones change": ("qwen3", {"messages": [ASKED, ANSWERED, AGAIN, LAST]}, "is changed by later mes"),
    "no assistant": ("qwen2_5", {"messages": [SYSTEM, ASKED]}, "no message of the assistant"),
    "an assistant of another format": (
        "qwen2_5", {"messages": [ASKED, {"role": "gpt", "content": "5"}]}, "no message of the assistant",
    ),
    "no assistant in the completion": ("qwen2_5", {"prompt": [ASKED, ANSWERED], "completion": [AGAIN]}, "no message"),
    "the assistant first": ("qwen2_5", {"messages": [ANSWERED, AGAIN, LAST]}, "begins with a message of the assistant"),
    "other columns": ("qwen2_5", {"text": "2+3=5"}, "has the columns text, expected messages, or prompt and"),
    "no messages": ("qwen2_5", {"messages": []}, r"has no chat messages in 'messages': its prompt is \[\], expected"),
    "a text as messages": ("qwen2_5", {"messages": "2+3?"}, "has no chat messages in 'messages': found '2.3.'"),
    "a message without a role": ("qwen2_5", {"messages": [{"content": "5"}]}, "message 1 of its prompt is "),
    "a message without content": ("qwen2_5", {"messages": [{"role": "user"}]}, "message 1 of its prompt is "),
    "text and messages": ("qwen2_5", {"prompt": "2+3=", "completion": [LAST]}, "has text as prompt and "),
    "an empty prompt": ("qwen2_5", {"prompt": "", "completion": "5"}, "has an empty prompt"),
    "images": ("qwen2_5", {"messages": [ASKED, LAST], "images": ["a.png"]}, "has images, which only environments"),
    "half of a character": (
        "qwen2_5", {"messages": [ASKED, {"role": "assistant", "content": "\ud800"}]}, "half of a surrogate pair",
    ),
    "messages that the template rejects": ("gemma3", {"messages": [ASKED, AGAIN, LAST]}, "template rejects"),
}  # fmt: skip
DPO_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no rejected": ({"prompt": "2+3=", "chosen": "5"}, "has the columns prompt, chosen, expected prompt, chosen"),
    "the same twice": ({"prompt": "2+3=", "chosen": "5", "rejected": "5"}, "has the same completion as chosen and as"),
    "texts without a prompt": ({"chosen": "2+3=5", "rejected": "2+3=6"}, "has no chat messages in 'chosen': found"),
}  # fmt: skip


@pytest.mark.parametrize("case", SFT_REFUSED)
def test_row_that_would_train_something_else_is_refused(tmp_path: Path, case: str) -> None:
    name, values, fault = SFT_REFUSED[case]
    ours, _ = encoder(tmp_path, name)
    with pytest.raises(RewardError, match=fault) as caught:
        ours.supervised(values)
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("case", DPO_REFUSED)
def test_row_that_is_no_pair_is_refused(tmp_path: Path, case: str) -> None:
    values, fault = DPO_REFUSED[case]
    ours, _ = encoder(tmp_path, "qwen2_5")
    with pytest.raises(RewardError, match=fault) as caught:
        ours.preference(values)
    assert caught.value.hint


def test_template_whose_mark_is_never_reached_is_refused(tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    ours = RowEncoder(tokenizer, {}, tokenizer.eos_token_id)
    with pytest.raises(RewardError, match="has no token of the assistant: the model's chat template marks none"):
        ours.supervised({"messages": [ASKED, ANSWERED]})


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = chat.tokenizer(tmp_path, "qwen2_5")
    tokenizer.chat_template = None
    with pytest.raises(RewardError, match="has chat messages, but the model's tokenizer has no chat template"):
        RowEncoder(tokenizer, {}, tokenizer.eos_token_id).supervised({"messages": [ASKED, ANSWERED]})


def test_digest_depends_on_every_token_and_the_order(tmp_path: Path) -> None:
    ours, _ = encoder(tmp_path, "qwen2_5")
    one, other = (ours.supervised({"prompt": "2+3=", "completion": text}) for text in ("5", "6"))
    pair = ours.preference({"prompt": "2+3=", "chosen": "5", "rejected": "6"})
    assert len({digest(rows) for rows in ([], [one], [other], [one, other], [other, one], [pair])}) == 6
    assert digest([one, other]) == digest(iter([one, other]))
    assert digest([one, other]).startswith("2:")
