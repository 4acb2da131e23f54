"""The tokens of a model: their texts, which of them end a completion, and how many have an embedding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from transformers import PreTrainedTokenizerBase

from bridge.core.foreign_code import described
from bridge.errors import RejectedRequestError, UsageError
from bridge.planning.model_size import RESIZE
from bridge.rollouts.chat_template import THOUGHT_ENDS, TOOL, end_of_turn, stop_ids
from bridge.rollouts.openai_api import IdsOf, ids_by_text
from bridge.weights import skeleton

ENDS_OF_THOUGHTS = (THOUGHT_ENDS, "[/THINK]")
"""Tokens that end a thought; the second one is Magistral's."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokens of one model."""

    ids_of: IdsOf | None = None
    """A token's text -> the ids of all tokens with this text, for servers that return tokens only as text."""
    special: Mapping[str, int] = field(default_factory=dict)
    """The special tokens; a server leaves them out of the text in which it looks for stop texts."""
    end_of_turn: str = ""
    """The token that ends a turn in the chat template, if it has one; of several by name, in the default."""
    end_id: int | None = None
    """Token id of `end_of_turn`."""
    end_ids: tuple[int, ...] = ()
    """Token ids at which chat completions must stop, unless servers stop there by themselves."""
    num_embeddings: int | None = None
    """Number of rows in the model's embedding; None if unknown."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, model_name: str) -> Self:
        added = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        named = {str(token): tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
        templates = tokenizer.chat_template
        end = end_of_turn(tokenizer) if templates is not None else ""
        end_id = tokenizer.convert_tokens_to_ids(end) if end else None
        ids = {} if end_id is None else {end: end_id}
        if isinstance(templates, Mapping) and (with_tools := end_of_turn(tokenizer, tools=[TOOL])):
            ids[with_tools] = tokenizer.convert_tokens_to_ids(with_tools)
        stops = stop_ids(tokenizer, model_name) if ids else set()
        return cls(
            ids_of=ids_by_text(tokenizer),
            special={text: token_id for text, token_id in (added | named).items() if text},
            end_of_turn=end,
            end_id=end_id,
            end_ids=tuple(token_id for token_id in ids.values() if token_id not in stops),
            num_embeddings=skeleton.num_embeddings(model_name),
        )

    def remarks(self, tokenizer: PreTrainedTokenizerBase, model_name: str) -> Iterator[str]:
        """Yield one line for each unusual property of the model's tokens."""
        for end_id in self.end_ids:
            end = tokenizer.convert_ids_to_tokens(end_id)
            yield (
                f"the chat template of {model_name} ends a turn with {end!r}, which is not an"
                " end-of-sequence token of the model: in this run, completions of chat messages end there. To serve the"
                f" trained model the same way, add {end_id} to eos_token_id in its generation_config.json"
            )
        if tokenizer.chat_template is not None and not self.end_of_turn and not self.end_ids:
            yield (
                f"the chat template of {model_name} does not end a turn with a special token: a completion ends at"
                f" {tokenizer.eos_token or 'no token'} or at --max-new-tokens (--stop TEXT ends it earlier)"
            )
        if inside := [token for token in ENDS_OF_THOUGHTS if token in self.special]:
            yield (
                f"{inside[0]} is a special token of {model_name}, and the text of a completion has none: a reward, such"
                " as math, and an agent cannot tell a thought from an answer. To keep it in the text, set"
                ' "special": false for it, and for the token that begins a thought, in tokenizer.json and'
                " tokenizer_config.json"
            )
        if beyond := self.beyond(tokenizer):
            yield f"{beyond}: a prompt with one of them cannot be used"

    def beyond(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return a sentence about the tokens without an embedding; empty if all tokens have one."""
        return skeleton.tokens_beyond(tokenizer, self.num_embeddings)

    def check_stop(self, texts: Sequence[str]) -> None:
        """Raise UsageError if a stop string mixes a special token with other text: it can never match."""
        for text in texts:
            inside = [token for token in self.special if token in text]
            if inside and text not in self.special:
                token = max(inside, key=len)
                raise UsageError(
                    f"--stop {described(text)} never ends a completion: {token} is a special token, which is not part"
                    " of the text that a server searches",
                    hint=f"use --stop {token!r}, which stops at the token itself",
                )

    def check_ids(self, token_ids: Sequence[int], whose: Callable[[], str]) -> None:
        """Raise RejectedRequestError if a token has no embedding; `whose` names the token's origin in the message."""
        if self.num_embeddings is None or not token_ids or (largest := max(token_ids)) < self.num_embeddings:
            return
        raise RejectedRequestError(
            f"token {largest} of {whose()} is beyond the model's {self.num_embeddings:,} embeddings", hint=RESIZE
        )
