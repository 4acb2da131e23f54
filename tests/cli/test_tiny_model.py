"""`bridge demo --model-only`: the model accepts any text, chats, and calls the docs' calculator."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bridge.agents.conversation import Conversation
from bridge_cli.demo_model import CALL, TINY_RECIPE, write_tiny
from bridge_cli.main import answer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    short = {name: {**part, "num_steps": 1} if isinstance(part, dict) else part for name, part in TINY_RECIPE.items()}
    return write_tiny(tmp_path_factory.mktemp("made") / "tiny", recipe=short)


def test_tokenizer_keeps_every_printable_text_unchanged(made: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    text = "How much is {'a': 3} + 4?\n#### 7 \\boxed{7} <tool_call>"
    token_ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in token_ids
    assert tokenizer.decode(token_ids, clean_up_tokenization_spaces=False) == text


def test_template_keeps_turns_and_renders_calls(made: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    conversation = Conversation(tokenizer, str(made), tools=[schema])
    call = tokenizer(f"{CALL[0]}12{CALL[1]}30{CALL[2]}<eos>")["input_ids"]
    _, (parsed,) = conversation.read(call)
    assert (parsed.name, parsed.arguments) == ("add", {"a": 12, "b": 30})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<system>Be brief.<user>1+2="


def test_folder_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    assert answer(["demo", "--model-only", str(tmp_path)]) == 2
    assert "--model-only" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
