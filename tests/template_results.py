"""How Bridge handles the chat templates of real models; docs/templates.md is generated from these results.

`python -m tests.template_results` writes the page. The templates are TRL's own copies of what models ship
(`trl/chat_templates`, without those that TRL changed for training), and Mistral's format v3. The tokenizers are created
here, since a template uses only a tokenizer's special tokens.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl
from transformers import GenerationConfig, PreTrainedTokenizerBase

from bridge.agents.conversation import Conversation
from bridge.errors import UsageError
from bridge.rollouts import chat_template
from bridge.rollouts.problems import encode
from bridge.rollouts.vocabulary import Vocabulary
from tests.models import chat

PAGE = Path(__file__).parents[1] / "docs" / "templates.md"
SPECIAL = re.compile(r"<[|｜][^<>{}'\"]+>|<[a-z_]+[|｜]>|<[a-z_]*(?:turn|utterance|eos|bos)[a-z_]*>|</s>|<s>")
"""Special tokens, as templates write them."""
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer", "description": "Which."}}},
    },
}
USER = {"role": "user", "content": "What do you see?"}
SEEN = {"role": "assistant", "content": "I see."}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "call00000", "function": {"name": "look_up", "arguments": {"number": 7}}}
    ],
}
PROMPTS: Mapping[str, Sequence[dict[str, Any]]] = {
    "user": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "later system": [USER, SEEN, {"role": "system", "content": "Be brief."}, USER],
    "earlier turns": [USER, SEEN, USER],
    "continued": [USER, {"role": "assistant", "content": "I see a"}],
    "tool": [USER, CALLED, {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": "A cat."}],
    "human": [{"role": "human", "content": "What do you see?"}],
    "function": [USER, SEEN, {"role": "function", "name": "look_up", "content": "A cat."}],
}
"""The messages of a prompt, by the table's column."""
COLUMNS = ("template", *PROMPTS, "column `tools`", "ends a turn", "tools of Bridge", "turns of a user")


@dataclass(frozen=True, kw_only=True)
class Result:
    """How Bridge handles one template."""

    cells: tuple[str, ...]
    """The cells of the row, without the name."""
    said: Mapping[str, str] = field(default_factory=dict)
    """By column, Bridge's message if something is lost."""


def names() -> list[str]:
    """Return the names of the table's templates."""
    folder = Path(trl.__file__).parent / "chat_templates"
    own = sorted(path.stem for path in folder.glob("*.jinja") if not path.stem.endswith("_training"))
    return [*own, "mistral"]


def results() -> dict[str, Result]:
    """Return the result of each template."""
    with tempfile.TemporaryDirectory() as folder:
        base = chat.tokenizer(Path(folder), "qwen2_5")
        return {name: result(_with_template(base, name, Path(folder)), Path(folder)) for name in names()}


def _with_template(base: PreTrainedTokenizerBase, name: str, folder: Path) -> PreTrainedTokenizerBase:
    """Return a tokenizer with this template and its special tokens, whose EOS is the end of a turn, as models ship."""
    tokenizer = deepcopy(base)
    tokenizer.chat_template = chat.template(name)
    tokenizer.add_tokens(sorted({*SPECIAL.findall(tokenizer.chat_template)}), special_tokens=True)
    tokenizer.eos_token = "</s>"
    if end := chat_template.end_of_turn(tokenizer):
        tokenizer.eos_token = end
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return tokenizer


def result(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Result:
    """Return the result of the template of `tokenizer`."""
    said: dict[str, str] = {}
    cells = [_of_prompt(tokenizer, column, [*messages], said) for column, messages in PROMPTS.items()]
    cells.append(_of_tools(tokenizer, said))
    vocabulary = Vocabulary.of(tokenizer, str(folder))
    cells.append(f"`{vocabulary.end_of_turn}`".replace("|", "\\|") if vocabulary.end_of_turn else "noted")
    if not vocabulary.end_of_turn:
        said["ends a turn"] = " ".join(vocabulary.remarks(tokenizer, "MODEL"))
    answers: tuple[tuple[str, Any, list[Any]], ...] = (
        ("tools of Bridge", "tool", [TOOL]), ("turns of a user", "user", []),
    )  # fmt: skip
    for column, answered_by, tools in answers:
        try:
            Conversation(tokenizer, str(folder), tools=tools, answers=answered_by)
        except UsageError as error:
            said[column] = error.message.replace(str(folder), "MODEL")
            cells.append("refused" if tools else "split")
        else:
            cells.append("yes")
    return Result(cells=tuple(cells), said=said)


def _of_prompt(
    tokenizer: PreTrainedTokenizerBase, column: str, messages: list[dict[str, Any]], said: dict[str, str]
) -> str:
    problem: Any = {"prompt": messages}
    try:
        text = str(tokenizer.decode(encode(tokenizer, problem)))
    except UsageError as error:
        said[column] = error.message
        return "refused"
    lines = [*chat_template.remarks(tokenizer, [problem], {})]
    if dropped := [line for line in lines if "drops earlier turns" in line]:
        said[column] = dropped[0]
        return "noted"
    role = messages[-1]["role"]
    if column in ("human", "function"):
        assert messages[-1]["content"] in text
        said[column] = lines[-1]
        return f"as `{role}`" if role in text else "yes"
    return "as system" if column == "developer" else "yes"


def _of_tools(tokenizer: PreTrainedTokenizerBase, said: dict[str, str]) -> str:
    problem: Any = {"prompt": [USER], "tools": [TOOL]}
    try:
        text = str(tokenizer.decode(encode(tokenizer, problem)))
    except UsageError as error:
        said["column `tools`"] = error.message
        return "refused"
    if "look_up" in text:
        return "yes"
    said["column `tools`"] = " ".join(chat_template.remarks(tokenizer, [problem], {}))
    return "noted"


INTRODUCTION = """\
# Chat templates

What Bridge makes of the chat templates that real models ship: TRL 1.16's copies of them (`trl/chat_templates` names the
models), and Mistral's format v3. `make test` computes this page again and compares it, so it holds for the installed
versions; `python -m tests.template_results` writes it.

Before vLLM starts, and for every prompt of a run, each message gets a marker of its own, which has to come out of the
template. A message that does not is refused, with its row, its role and the roles that the template renders: the model
would train on a question that it never saw. During a run such a prompt costs its group. What is refused here can be
trained with other roles in the data, or with another template, as `chat_template.jinja` in the model's folder.

- `developer` is rendered as `system`, as in the requests of an agent.
- A prompt that ends with a message of the assistant is continued (`continued`).
- `tools`, `documents` and `chat_template_kwargs` of a row reach a template that uses them. What no template uses, and
  every other column of a row, is named once: rewards get it, and the model does not see it.
- A completion of chat messages ends at the token that ends a turn in the template, even if a base model's
  configuration does not list it. The run logs it, and `bridge doctor --model MODEL` warns of it.

"""
READING = """
| cell | meaning |
|---|---|
| yes | every message comes out |
| as system | so does this one, with the role `system` |
| as `ROLE` | the template writes the role as it is, which the model may not know: the run logs it |
| noted | something does not come out: the run logs it |
| refused | the run ends before vLLM starts, with one line |
| split | as the model of an agent: an agent's later turns are token sequences of their own, and the run logs it |

`tools of Bridge` is whether an [environment with tools](environments.md#tools-and-turns) can continue over calls and
answers with the very tokens that were sampled; `turns of a user` is the same over messages of a user.

## What Bridge says

"""


def page(found: Mapping[str, Result]) -> str:
    """Return the page of the docs."""
    rows = [(name, *one.cells) for name, one in found.items()]
    return INTRODUCTION + _table(COLUMNS, rows) + READING + "".join(_said(found))


def _said(found: Mapping[str, Result]) -> Iterator[str]:
    """Yield each message once, with the columns and templates that it concerns."""
    about: dict[str, dict[str, list[str]]] = {}
    for name, one in found.items():
        for column, line in one.said.items():
            about.setdefault(line, {}).setdefault(column, []).append(name)
    for line, columns in sorted(about.items(), key=lambda pair: (sorted(pair[1]), pair[0])):
        where = "; ".join(f"{column}: {', '.join(of)}" for column, of in sorted(columns.items()))
        yield f"- {where}\n\n  ```\n  {line}\n  ```\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ["---"] * len(columns), *rows))


if __name__ == "__main__":
    PAGE.write_text(page(results()))
