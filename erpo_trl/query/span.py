"""Which tokens of a prompt the query side counts: all, the user's words, or every message without the template around it.

The template itself tells where it writes a message's text: it is rendered once more with private-use characters around each
text, as transformers does for `apply_chat_template(sanitize_control_tokens=True)`. Without these marks the second rendering
must be the first, character for character; where it is not, the template's output depends on the text and is refused. No text
is searched for, so that it may repeat another one, or look like the template.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl.data_utils import is_conversational, prepare_multimodal_messages

from .fingerprint import query_key

# Value of `query_span` -> the roles whose texts it holds, None for those of all roles
SPAN_ROLES = {"user": ("user",), "content": None}
SPANS = ("prompt", *SPAN_ROLES)
# Private use, plane 16; transformers' own marks are in plane 15
_MARKS = range(0x100000, 0x10FFFE)

Span = tuple[int, int]


def _texts(messages: Sequence[dict], roles: Iterable[str] | None) -> Iterator[tuple[dict, str, str]]:
    """(holder, key, text) of every text of the messages with these roles, its parts where a content has several."""
    for message in messages:
        if roles is not None and message["role"] not in roles:
            continue
        content = message.get("content")
        if isinstance(content, str):
            yield message, "content", content
        elif isinstance(content, (list, tuple)):
            for part in content:
                if isinstance(part, dict) and isinstance(part.get("text"), str):
                    yield part, "text", part["text"]


def written_spans(
    render: Callable[[list[dict]], str], messages: Sequence[dict], roles: Iterable[str] | None = None
) -> tuple[str, list[Span]]:
    """Where a chat template writes the messages' texts.

    Whitespace around a text belongs to it where the template keeps it. What a template writes beside texts (tools, arguments
    of tool calls, reasoning, contents that are no text) is the template's.

    Args:
        render: messages -> the prompt as text.
        messages: of one prompt; left as they are.
        roles: whose texts; None for those of all.

    Returns:
        The prompt, and the (start, end) characters of each place where a text stands: in order, disjoint, not touching.

    Raises:
        ValueError: the template reads the texts, so that marks in them change what else it writes.
    """
    prompt = render(list(messages))
    texts = [text for *_, text in _texts(messages, roles)]
    used = set(prompt).union(*texts)
    free = (mark for mark in map(chr, _MARKS) if mark not in used)
    marks = [(next(free), next(free)) for _ in texts]
    unmark = {ord(mark): None for pair in marks for mark in pair}

    def marked(ends: list[Span | None]) -> str | None:
        """The rendering with marks at these ends of each text; None where it is not the prompt with marks."""
        copied = copy.deepcopy(list(messages))
        for (holder, key, text), (opening, closing), at in zip(list(_texts(copied, roles)), marks, ends):
            if at is not None:
                start, end = at
                holder[key] = text[:start] + opening + text[start:end] + closing + text[end:]
        try:
            rendered = render(copied)
        except Exception:  # the prompt itself was rendered: the template reads its texts
            return None
        return rendered if rendered.translate(unmark) == prompt else None

    # An empty text would be no longer empty with marks, and a template may ask for that
    outer = [(0, len(text)) if text else None for text in texts]
    rendered = marked(outer)
    if rendered is None:
        # Templates that strip must find whitespace outside the marks; each end that is kept goes back out
        ends = [(len(text) - len(text.lstrip()), len(text.rstrip())) if text.strip() else None for text in texts]
        rendered = marked(ends)
        if rendered is None:
            raise ValueError("its chat template writes other text around a message depending on what the message says")
        for i, widest in enumerate(outer):
            if widest is None:
                continue
            for left, right in ((True, False), (False, True)):
                start, end = ends[i] or widest
                wider = (0 if left else start, widest[1] if right else end)
                if wider == ends[i]:
                    continue
                tried = marked([*ends[:i], wider, *ends[i + 1 :]])
                if tried is not None:
                    ends[i], rendered = wider, tried
    return prompt, _marked_spans(rendered, marks)


def _marked_spans(rendered: str, marks: list[tuple[str, str]]) -> list[Span]:
    """The (start, end) between each pair of marks, counted without marks; touching and overlapping ones as one."""
    if not marks:
        return []
    closing_of = dict(marks)
    waiting: dict[str, int] = {}  # closing mark -> start
    spans = []
    found = re.finditer(f"[{''.join(map(''.join, marks))}]", rendered)
    for before, match in enumerate(found):
        mark, place = match[0], match.start() - before
        if mark in closing_of and closing_of[mark] not in waiting:
            waiting[closing_of[mark]] = place
        elif mark in waiting:
            spans.append((waiting.pop(mark), place))
        else:
            waiting[mark] = place
            break
    if waiting:
        raise ValueError("its chat template writes only a part of a message's text")
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            start, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((start, end))
    return merged


def tokens_inside(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Which tokens lie wholly inside one of the spans: a token that a border cuts is outside.

    Args:
        offsets: (T, 2) characters that each token covers; spans: (S, 2) characters.

    Returns:
        (T,) bool.
    """
    start, end = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(start), dtype=bool)
    for first, last in spans:
        inside |= (first <= start) & (start < end) & (end <= last)
    return inside


def stretches(inside: np.ndarray) -> list[int]:
    """A (T,) mask as start, end of each run of True, flat: [0, 1, 1, 0, 1] -> [1, 3, 4, 5]."""
    edges = np.diff(np.concatenate([[False], inside, [False]]).astype(np.int8))
    return np.flatnonzero(edges).tolist()


def scored_in_span(span: Sequence[int], length: int) -> np.ndarray:
    """Which tokens of a query count: those in its span, but never the first, which has no context.

    Args:
        span: start, end of each stretch in token positions, flat; length: T, the query's tokens.

    Returns:
        (T-1,) bool; entry t is about token t+1, as in `ref_query_logps`.
    """
    span = np.asarray(span, dtype=np.int64)
    edges = np.zeros(length + 1, dtype=np.int64)
    edges[span[::2]] += 1
    edges[span[1::2]] -= 1
    return edges.cumsum()[1:length] > 0


def span_key(ids: Sequence[int], span: Sequence[int]) -> int:
    """Name of a query together with what counts of it: the same ids may be the user's in one row and not in another."""
    return query_key(ids) if list(span) == [0, len(ids)] else query_key([*ids, -1, *span])


class SpanFinder:
    """Finds a prompt's span: (prompt, its token ids) -> start, end of each stretch of tokens, flat.

    Args:
        span: a value of `SPANS`.
        processing_class: the tokenizer or processor that training uses.
        template: arguments of its `apply_chat_template` in training, beside the conversation.

    Raises:
        ValueError: the tokenizer cannot tell which characters a token covers.
    """

    def __init__(self, span: str, processing_class: PreTrainedTokenizerBase | ProcessorMixin, template: dict):
        self.span, self.processing_class, self.template = span, processing_class, template
        if span == "prompt":
            return
        whole = isinstance(processing_class, ProcessorMixin)
        tokenizer = processing_class.tokenizer if whole else processing_class
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"query_span={span!r} needs a fast tokenizer, which knows the characters of each token; "
                f"{type(tokenizer).__name__} is none. Use query_span='prompt'."
            )
        if template.get("sanitize_control_tokens"):
            raise ValueError(
                f"query_span={span!r} cannot be found with sanitize_control_tokens in chat_template_kwargs, which tokenizes "
                "messages in pieces. Use query_span='prompt', or unset it."
            )
        self._backend = copy.deepcopy(backend)
        # It adds nothing to a chat, but may leave spaces out of the characters of a token (ByteLevel's trim_offsets)
        self._backend.post_processor = None
        self._backend.encode_special_tokens = backend.encode_special_tokens
        self._backend.no_truncation()
        self._backend.no_padding()

    def _render(self, messages: list[dict]) -> str:
        if isinstance(self.processing_class, ProcessorMixin):
            messages = prepare_multimodal_messages(messages)
        return self.processing_class.apply_chat_template(
            conversation=messages, add_generation_prompt=True, tokenize=False, **self.template
        )

    def __call__(self, prompt: str | list[dict], ids: Sequence[int], row: str) -> list[int]:
        """Find the span of one prompt.

        Args:
            prompt: text, or messages.
            ids: (T,) the tokens that it is trained with.
            row: what an error calls it.

        Raises:
            ValueError: the prompt is no chat, or its span cannot be known.
        """
        if self.span == "prompt":
            return [0, len(ids)]
        advice = f"so query_span={self.span!r} cannot be found in it. Use query_span='prompt'"
        if not is_conversational({"prompt": prompt}):
            raise ValueError(f"{row}: the prompt is plain text without messages, {advice}.")
        try:
            text, spans = written_spans(self._render, prompt, SPAN_ROLES[self.span])
        except ValueError as error:
            raise ValueError(f"{row}: {error}, {advice}.") from error
        encoding = self._backend.encode(text, add_special_tokens=False)
        if not np.array_equal(encoding.ids, ids):
            raise ValueError(
                f"{row}: its chat template and tokenizer give {len(encoding.ids)} tokens that are not the {len(ids)} trained "
                f"on, {advice}."
            )
        return stretches(tokens_inside(encoding.offsets, spans))

    def of_rows(self, dataset: Dataset, ids: Sequence[np.ndarray], names: Sequence[int]) -> Iterator[list[list[int]]]:
        """The spans of an unformatted data set's prompts, in batches; `names` are the indices that errors call its rows."""
        for start in range(0, len(ids), 1000):
            rows = range(start, min(start + 1000, len(ids)))
            prompts = [None] * len(rows) if self.span == "prompt" else dataset[start : rows.stop]["prompt"]
            yield [self(prompt, ids[i], f"Row {names[i]} of the data set") for i, prompt in zip(rows, prompts)]
