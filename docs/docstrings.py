"""How this package's docstrings become pages, beside what Google's style says (a Griffe extension, named in mkdocs.yml).

Short sections stand on one line (`Returns: (N,) weights.`), the fields of configs are written as in transformers, and
`[`name`]` is a reference in the manner of Hugging Face's docs.
"""

import re

import griffe

SECTION = re.compile(r"^(Args|Attributes|Files|Logs|Raises|Returns|Source|Sources): (?=\S)", re.MULTILINE)
REFERENCE = re.compile(r"\[(`[^`]+`)\](?![(\[])")
FIELDS = re.compile(r"^Parameters:\n((?:[ ]{4}.*\n?|\n)+)", re.MULTILINE)
# `name (`type`, *optional*)`, perhaps several, as the head of a field
HEAD = re.compile(r"^ {4}(?=\w)(.+):$", re.MULTILINE)
NAME = re.compile(r"(\w+) (\(`)")


def _field_list(found: re.Match) -> str:
    """Fields as in transformers -> a list."""
    heads = HEAD.sub(lambda head: "- " + NAME.sub(r"**`\1`** \2", head[1]) + ":  ", found[1])
    return f"**Parameters**\n\n{re.sub(r'^ {8}', '    ', heads, flags=re.MULTILINE)}"


def as_markdown(docstring: str) -> str:
    """What stands in the source -> what Griffe reads as Google's style."""
    text = FIELDS.sub(_field_list, docstring)
    text = SECTION.sub(r"\n**\1:** ", text)
    return REFERENCE.sub(lambda found: found[1].replace("~", ""), text)


class Docstrings(griffe.Extension):
    """Rewrites every docstring once it is read."""

    def on_object(self, *, obj, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
