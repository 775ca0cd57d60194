"""One prompt, one forward: the responses of a query share its prompt in the transformer's layers.

Rows of a batch whose prompts are equal become one group: the prompt once, then each row's completion as a branch, which sees
the prompt and itself only and counts its positions from the prompt's end. The layers run on that; their last hidden states are
laid out again as the rows were, the prompt's once for each of its rows. So whatever follows the layers (head, labels,
log-probs, entropies, the router's loss) is the plain forward's own, and the last prompt token predicts every branch's first.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from .branches import BranchMask, additive, branches_of, sees


@dataclass(frozen=True)
class Layout:
    """Where the real tokens of a batch of B rows and L columns lie when they are packed into R rows of S slots.

    Args:
        source: (R, S) int64, the token in each slot as an index into the flattened (B, L); any for padding.
        position: (R, S) int64, its distance from the first real token of its row.
        group: (R, S) int64, which prompt it belongs to; -1 for padding.
        branch: (R, S) int64, 0 for a prompt, else the number of its completion within the group.
        place: (B, L) int64, the slot of each token as an index into the flattened (R, S); for padding that of a neighbour.
        longest: real tokens of the longest row.
    """

    source: np.ndarray
    position: np.ndarray
    group: np.ndarray
    branch: np.ndarray
    place: np.ndarray
    longest: int


def plan(ids: np.ndarray, real: np.ndarray, prompt_width: int) -> Layout | None:
    """Lay out a batch so that equal prompts are held once.

    Groups are as long as their tokens, and several fill one packed row up to the length of the longest group, so that there
    is padding at the ends of packed rows only.

    Args:
        ids: (B, L) token ids; real: (B, L) bool, False on padding; prompt_width: columns of the prompt.

    Returns:
        the layout, or None where no two rows share a prompt.
    """
    rows, columns = ids.shape
    prompts: dict[bytes, list[int]] = {}
    for row in range(rows):
        key = np.where(real[row, :prompt_width], ids[row, :prompt_width], -1).tobytes()
        prompts.setdefault(key, []).append(row)
    if len(prompts) == rows:
        return None

    first = real.argmax(axis=1)
    groups = []  # of each: row, column and branch of its tokens
    for members in prompts.values():
        parts = [(members[0], np.flatnonzero(real[members[0], :prompt_width]), 0)]
        for number, row in enumerate(members, start=1):
            parts.append((row, prompt_width + np.flatnonzero(real[row, prompt_width:]), number))
        tokens = [np.stack([np.full_like(where, row), where, np.full_like(where, part)]) for row, where, part in parts]
        groups.append((members, np.concatenate(tokens, axis=1)))

    lengths = [tokens.shape[1] for _, tokens in groups]
    packed, used = _fill(lengths)
    shape = (len(used), max(lengths))
    source, position, branch = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    group = np.full(shape, -1, dtype=np.int64)
    place = np.zeros((rows, columns), dtype=np.int64)
    for number, (members, (row, column, part)) in enumerate(groups):
        at, start = packed[number]
        slots = slice(start, start + len(row))
        source[at, slots] = row * columns + column
        position[at, slots] = column - first[row]
        branch[at, slots] = part
        group[at, slots] = number
        slot = at * shape[1] + start + np.arange(len(row))
        shared = part == 0
        place[np.ix_(members, column[shared])] = slot[shared]
        place[row[~shared], column[~shared]] = slot[~shared]
    before = np.maximum.accumulate(np.where(real, np.arange(columns), -1), axis=1)
    place = np.take_along_axis(place, np.maximum(before, first[:, None]), axis=1)
    return Layout(source, position, group, branch, place, int(real.sum(axis=1).max()))


def _fill(lengths: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Each length's (row, start) in rows as long as the longest, first fit from the longest; and what each row holds."""
    used: list[int] = []
    packed = [(0, 0)] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row, n in enumerate(used) if n + lengths[number] <= max(lengths)), len(used))
        if row == len(used):
            used.append(0)
        packed[number] = (row, used[row])
        used[row] += lengths[number]
    return packed, used


def unpack(states: Tensor, place: Tensor) -> Tensor:
    """(R, S, H) or (R·S, H) states of packed slots as (B, L, H); a prompt's go to each of its rows, with their gradients' sum."""
    flat = states.reshape(-1, states.shape[-1])
    return flat.index_select(0, place.flatten()).view(*place.shape, -1)


@contextlib.contextmanager
def shared_prefixes(
    backbone: nn.Module, prompt_width: int, eager: bool, wanted: Callable[[Layout], bool]
) -> Iterator[None]:
    """Inside, forwards of `backbone` on rows of [prompt; completion] run every distinct prompt once.

    It takes `input_ids` and a 2D `attention_mask` by keyword and returns as it would without: (B, L, H) hidden states and, of a
    mixture of experts, router logits of B·L tokens. At padding the values are those of a real token.

    Args:
        backbone: the transformer without its head.
        prompt_width: columns of the prompt.
        eager: whether its attention adds a float mask to the scores, rather than call `scaled_dot_product_attention`.
        wanted: whether to use a layout; else the forward is the plain one.
    """
    place: Tensor | None = None

    def pack(module, args, kwargs):
        nonlocal place
        ids, real = kwargs["input_ids"], kwargs["attention_mask"].bool()
        layout = plan(ids.cpu().numpy(), real.cpu().numpy(), prompt_width)
        if layout is None or not wanted(layout):
            return None
        source, position, group, branch, place = (
            torch.from_numpy(x).to(ids.device)
            for x in (layout.source, layout.position, layout.group, layout.branch, layout.place)
        )
        if eager:
            mask = additive(sees(group, branch), module.get_input_embeddings().weight.dtype)
        else:
            mask = BranchMask.of(group, branch, branches_of(layout.group, layout.branch, ids.device))
        packed = {
            "input_ids": ids.flatten()[source],
            "attention_mask": mask,
            "position_ids": position,
        }
        return args, kwargs | packed

    def lay_out(module, args, kwargs, output):
        nonlocal place
        if place is None:
            return None
        output.last_hidden_state = unpack(output.last_hidden_state, place)
        if output.get("router_logits") is not None:
            output.router_logits = tuple(unpack(logits, place).flatten(0, 1) for logits in output.router_logits)
        place = None
        return output

    handles = [
        backbone.register_forward_pre_hook(pack, with_kwargs=True),
        backbone.register_forward_hook(lay_out, with_kwargs=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
