"""A report as a document: sections of sentences, tables and pictures, written as Markdown and as one HTML file."""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..evaluation.report import escaped, markdown

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
img { max-width: 100%; height: auto; } figure { margin: 1rem 0; } figcaption { color: #444; font-size: .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: left; } th { border-bottom: 2px solid #888; }
.missing { color: #6b4500; background: #fff6e0; border-left: 4px solid #e69f00; padding: .3rem .8rem; margin: .5rem 0; }
"""


@dataclass(frozen=True)
class Picture:
    """Args: name: of its files, without ending; png: its bytes; caption: also read to those who do not see it."""

    name: str
    png: bytes
    caption: str


@dataclass
class Section:
    """Args: title; blocks: sentences, tables (rows, the first being the head) and [`Picture`]s, in their order; missing: sentences
    on what could not be shown."""

    title: str
    blocks: list[str | list[list[str]] | Picture] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """Pictures are the PNGs beside the file."""
    lines = [f"# {title}", ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            if isinstance(block, Picture):
                lines += [f"![{section.title}]({block.name}.png)", "", block.caption, ""]
            elif isinstance(block, str):
                lines += [_markdown_text(block), ""]
            else:
                lines += [markdown(escaped([[_markdown_text(cell) for cell in row] for row in block])), ""]
        for sentence in section.missing:
            lines += [f"> {_markdown_text(sentence)}", ""]
    return "\n".join(lines)


def _markdown_text(text: str) -> str:
    """With what a viewer would take for HTML escaped; backticks keep it as it is."""
    return re.sub(r"`[^`]*`|<", lambda found: "&lt;" if found[0] == "<" else found[0], text)


def as_html(title: str, sections: Sequence[Section]) -> str:
    """One file that needs no other: pictures are data URIs, there is no script and nothing is fetched."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # Else a browser asks the server, or the folder, for an icon
        '<link rel="icon" href="data:,">',
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>",
    ]
    for section in sections:
        parts.append(f"<section>\n<h2>{html.escape(section.title)}</h2>")
        for block in section.blocks:
            if isinstance(block, Picture):
                data = base64.b64encode(block.png).decode()
                caption = _html_text(block.caption)
                parts.append(
                    f'<figure><img alt="{html.escape(section.title)}" src="data:image/png;base64,{data}">'
                    f"<figcaption>{caption}</figcaption></figure>"
                )
            elif isinstance(block, str):
                parts.append(f"<p>{_html_text(block)}</p>")
            else:
                parts.append(_html_table(block))
        parts += [f'<p class="missing">{_html_text(sentence)}</p>' for sentence in section.missing]
        parts.append("</section>")
    parts.append("</body>\n</html>\n")
    return "\n".join(parts)


def _html_text(sentence: str) -> str:
    """Escaped, with what Markdown's backticks enclose as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(sentence))


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows[1:])
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>'
