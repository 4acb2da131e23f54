"""Tokenizers of a few hundred tokens with the chat templates of real models.

Source: TRL 1.16 has the templates of Qwen, Llama and Gemma as their models ship them (`trl/chat_templates`, with a
README that names each model). Mistral's is written here for its format v3 (`mistral_common`, instruct tokenizer v3).
"""

from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

MISTRAL = """{{ bos_token }}{% set last = (messages | selectattr("role", "equalto", "user") | list)[-1] %}
{%- for message in messages %}
  {%- if message.role == "user" %}
    {%- if tools and message == last %}{{ "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}{% endif %}
    {{- "[INST] " + message.content + "[/INST]" }}
  {%- elif message.tool_calls %}
    {{- "[TOOL_CALLS] [" }}
    {%- for call in message.tool_calls %}
      {%- if call.id | length != 9 %}{{ raise_exception("ids of calls have nine characters") }}{% endif %}
      {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (", " if not loop.last else "]" + eos_token) }}
    {%- endfor %}
  {%- elif message.role == "assistant" %}
    {{- " " + message.content | trim + eos_token }}
  {%- elif message.role == "tool" %}
    {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id }}
    {{- '"}[/TOOL_RESULTS]' }}
  {%- endif %}
{%- endfor %}"""
ENDS = {"qwen": "<|im_end|>", "llama": "<|eot_id|>", "gemma": "<end_of_turn>", "mistr": "</s>"}
"""Beginning of a template's name -> its end of a turn."""
OTHERS = (
    "<s>", "<|im_start|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<start_of_turn>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
LEARNT = '{"name": "add", "arguments": {"a": 12, "b": 7}} user assistant tool_response The answer is 19, I think. ' * 9


def template(name: str) -> str:
    """Return a chat template by TRL's name for it, or `mistral`."""
    return MISTRAL if name == "mistral" else (Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text()


def tokenizer(folder: Path, name: str) -> PreTrainedTokenizerBase:
    """Write a byte-level tokenizer with some merges and the template `name` to `folder`, and return it."""
    end = ENDS[name[:5].rstrip("23_")]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([LEARNT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token=end, additional_special_tokens=[*OTHERS, *ENDS.values()]
    )
    made.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])  # not special tokens, as in Qwen 3
    made.chat_template = template(name)
    made.save_pretrained(folder)
    GenerationConfig(eos_token_id=made.eos_token_id).save_pretrained(folder)
    return made
