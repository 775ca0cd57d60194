"""The demo's tokenizer: one token per character, and a chat template with one token per turn marker."""

import string

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, UNK, END = "<|pad|>", "<unk>", "<|end|>"
ROLES = ("system", "user", "assistant")

# Printable ASCII and the newline; any other character becomes <unk>.
CHARACTERS = sorted(set(string.printable) - set("\t\r\x0b\x0c"))

# The generation markers let TRL's SFT train on assistant turns only.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception("role is '" + message['role'] + "', expected system, user or assistant") -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A character-level tokenizer with 102 tokens; eos ends every turn and differs from pad, and there is no bos."""
    specials = [PAD, UNK, END, *(f"<|{role}|>" for role in ROLES)]
    vocabulary = {token: index for index, token in enumerate([*specials, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    # Fuse joins characters without the spaces that the default decoder puts between words.
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=256,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )
