"""Attention over packed rows that computes no pair of tokens from different branches.

A dense mask makes attention pay for the pairs that it forbids, and most pairs of a packed row are. Here the prompts are unpacked
to a batch of their own, causal among themselves, and the branches to a batch whose keys are their prompt's and their own: no more
pairs than in the plain rows, by the same kernel. torch's own `CausalBias` is the model for how it is reached: a mask that
`scaled_dot_product_attention` asks what to do. So it follows the mask wherever that goes, into layers that are run again in a
backward too, and a model that does anything else with it finds the dense mask.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only


def sees(group: Tensor, branch: Tensor) -> Tensor:
    """Which slots a slot attends to: itself and what is before it in its group's prompt and its own branch.

    Args:
        group, branch: (R, S), see `prefix.Layout`.

    Returns:
        (R, 1, S, S) bool, [r, 0, i, j] True where slot i sees slot j. Padding sees padding: no row is empty, so a softmax
        over it is finite.
    """
    slots = group.shape[1]
    causal = torch.ones(slots, slots, dtype=torch.bool, device=group.device).tril()
    same_group = group.unsqueeze(2) == group.unsqueeze(1)
    own = (branch.unsqueeze(2) == branch.unsqueeze(1)) | (branch == 0).unsqueeze(1)
    return (causal & same_group & own).unsqueeze(1)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as eager attention adds it to its scores: 0 where a slot is seen, the dtype's lowest number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


@dataclass(frozen=True)
class Branches:
    """Which of N packed slots attend together: G prompts of up to P tokens, B branches of up to C.

    Args:
        prompts: (G, P) int64, slots of each prompt, padded at the end.
        queries: (B, C) int64, slots of each branch, padded at the end.
        keys: (B, P + C) int64, slots of the branch's prompt, padded as above, then those of the branch.
        seen: bool, True where a query sees a key: (C, P + C) where all prompts are as long, else (B, 1, C, P + C).
        place: (N,) int64, each slot among the G·P of `prompts` and the B·C of `queries`, flattened one after the other.
    """

    prompts: Tensor
    queries: Tensor
    keys: Tensor
    seen: Tensor
    place: Tensor


def sizes(group: np.ndarray, branch: np.ndarray) -> tuple[int, int, int, int]:
    """(G, P, B, C) of the [`Branches`] of such slots."""
    prompts, branches, _ = _parts(group, branch)
    return len(prompts), _longest(prompts), len(branches), _longest(branches)


def _parts(group: np.ndarray, branch: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    """The slots of each prompt, those of each branch, and the number of each branch's prompt. One branch at least, if empty."""
    group, branch = group.ravel(), branch.ravel()
    prompts, branches, owners = [], [], []
    for number in range(group.max() + 1):
        slots = np.flatnonzero(group == number)  # they lie together: the prompt first, then branch after branch
        shared = int((branch[slots] == 0).sum())
        own = slots[shared:]
        parts = np.split(own, np.flatnonzero(np.diff(branch[own])) + 1) if len(own) else []
        prompts.append(slots[:shared])
        branches += parts
        owners += [number] * len(parts)
    if not branches:
        branches, owners = [group[:0]], [0]
    return prompts, branches, owners


def _longest(rows: list[np.ndarray]) -> int:
    return max(1, max(map(len, rows)))


def _padded(rows: list[np.ndarray], width: int) -> np.ndarray:
    """Padded with slot 0: what stands there is neither seen nor kept."""
    padded = np.zeros((len(rows), width), dtype=np.int64)
    for number, slots in enumerate(rows):
        padded[number, : len(slots)] = slots
    return padded


def branches_of(group: np.ndarray, branch: np.ndarray, device: torch.device) -> Branches:
    """The branches of (R, S) slots, see `prefix.Layout`."""
    prompt_slots, branch_slots, owner = _parts(group, branch)
    prompts = _padded(prompt_slots, _longest(prompt_slots))
    queries = _padded(branch_slots, _longest(branch_slots))
    width = prompts.shape[1]

    seen = np.tril(np.ones((queries.shape[1], width + queries.shape[1]), dtype=bool), width)
    lengths = np.array([len(slots) for slots in prompt_slots])[owner]
    if (lengths < width).any():
        column = np.arange(seen.shape[1])
        seen = seen & ((column < lengths[:, None]) | (column >= width))[:, None, None, :]

    place = np.zeros(group.size, dtype=np.int64)
    for start, rows, columns in ((0, prompt_slots, width), (prompts.size, branch_slots, queries.shape[1])):
        for number, slots in enumerate(rows):
            place[slots] = start + number * columns + np.arange(len(slots))
    keys = np.concatenate([prompts[owner], queries], axis=1)
    return Branches(*(torch.from_numpy(x).to(device) for x in (prompts, queries, keys, seen, place)))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    branches: Branches,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention of each packed slot to itself and what is before it in its prompt and its own branch.

    Args:
        query, key, value: (R, heads, S, size), R·S the slots of `branches`; keys and values may have fewer heads with `enable_gqa`.
        dropout_p, scale, enable_gqa: of `scaled_dot_product_attention`.

    Returns:
        (R, heads, S, size of the values).
    """
    slots = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]

    def pick(x: Tensor, where: Tensor) -> Tensor:
        return x.index_select(0, where.flatten()).view(*where.shape, *x.shape[1:]).transpose(1, 2)

    options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    prompts = scaled_dot_product_attention(*(pick(x, branches.prompts) for x in slots), is_causal=True, **options)
    inputs = (pick(x, where) for x, where in zip(slots, (branches.queries, branches.keys, branches.keys)))
    completions = scaled_dot_product_attention(*inputs, attn_mask=branches.seen, **options)
    states = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in (prompts, completions)])
    rows, _, columns, _ = query.shape
    return states.index_select(0, branches.place).unflatten(0, (rows, columns)).transpose(1, 2)


class BranchMask(Tensor):
    """The mask of [`sees`] as long as nobody looks into it: `scaled_dot_product_attention` by [`attend`] instead.

    Whatever else is done with it is done with the dense mask. It holds no memory for its pairs.
    """

    @staticmethod
    def of(group: Tensor, branch: Tensor, branches: Branches) -> "BranchMask":
        """The mask of (R, S) slots whose [`Branches`] these are."""
        rows, slots = group.shape
        unread = torch.ones(1, dtype=torch.bool, device=group.device).expand(rows, 1, slots, slots)
        mask = unread.as_subclass(BranchMask)
        mask._slots, mask._branches = (group, branch), branches
        return mask

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _LOOKS_OUTSIDE:
            return super().__torch_function__(func, types, args, kwargs)
        if func is scaled_dot_product_attention:
            return _by_branches(*args, **kwargs)
        args, kwargs = tree_map_only(BranchMask, lambda mask: sees(*mask._slots), (args, kwargs))
        return func(*args, **kwargs)


# What a mask may be asked without being made
_LOOKS_OUTSIDE = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")
    ),
    *(Tensor.size, Tensor.dim, Tensor.__len__, Tensor.is_floating_point, torch.is_floating_point),
}


def _by_branches(query, key, value, attn_mask, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Tensor:
    """`scaled_dot_product_attention` for a [`BranchMask`]."""
    if is_causal:
        raise ValueError("is_causal must be False where there is a mask")
    return attend(query, key, value, attn_mask._branches, dropout_p, scale, enable_gqa)
