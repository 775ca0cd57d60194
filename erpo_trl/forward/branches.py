"""Attention over packed rows that computes no pair of tokens from different branches.

A dense mask makes attention pay for the pairs that it forbids, and most pairs of a packed row are. Here queries, keys and values
are unpacked into a batch, by whichever of two ways is cheaper, and what comes out is packed again:

- as rows: prompt and completion of each row, padded at the end, by the causal kernel without any mask. The prompts' pairs are
  computed once a row, as they are in plain rows.
- as branches: the prompts as a batch of their own, causal among themselves, and the completions as a batch whose keys are their
  prompt's and their own.

Neither has more pairs than the plain rows. torch's own `CausalBias` is the model for how this is reached: a mask that
`scaled_dot_product_attention` asks what to do. So it follows the mask wherever that goes, into layers that are run again in a
backward too, and a model that does anything else with it finds the dense mask.
"""

from dataclasses import dataclass
from typing import NamedTuple

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
    """Which of N packed slots attend together: G prompts of up to P tokens, B completions of up to C.

    As rows, `prompts` is empty, `queries` and `keys` are the same (B, L), and no mask is needed beside causality.

    Args:
        prompts: (G, P) int64, slots of each prompt, padded at the end; as rows (0, 0).
        queries: (B, C) int64, slots of each completion, padded at the end.
        keys: (B, P + C) int64, slots of the completion's prompt, padded as above, then those of the completion.
        seen: bool, True where a query sees a key: (C, P + C) where all prompts are as long, else (B, 1, C, P + C); as rows None.
        place: (N,) int64, each slot among the G·P of `prompts` and the B·C of `queries`, flattened one after the other.
    """

    prompts: Tensor
    queries: Tensor
    keys: Tensor
    seen: Tensor | None
    place: Tensor


class Price(NamedTuple):
    """What attention pays, in the time of so many pairs' operations as a matrix product would need.

    Args: causal: for each pair of a square under the causal kernel, seen or not; masked: for a pair under a mask; moved: for a
    token that is unpacked.
    """

    causal: float
    masked: float
    moved: float


# Fitted to forward and backward with 1 thread at sizes 64 to 1152. Elsewhere not measured: flash attention has no masks, so that
# a masked pair is set to cost several unmasked ones, and a guess costs a saving rather than time.
_PRICES = {"cpu": Price(1.3, 1.6, 70.0)}
_PRICE_ELSEWHERE = Price(1.0, 6.0, 1200.0)


def price(device: str) -> Price:
    """Args: device: its type, e.g. `cuda`."""
    return _PRICES.get(device, _PRICE_ELSEWHERE)


@dataclass(frozen=True)
class Way:
    """One of the two ways to unpack. Args: as_rows: which; causal, masked, moved: how many of what has a [`Price`]."""

    as_rows: bool
    causal: int
    masked: int
    moved: int

    def cost(self, device: str) -> float:
        causal, masked, moved = price(device)
        return self.causal * causal + self.masked * masked + self.moved * moved


@dataclass(frozen=True)
class Parts:
    """The slots of each prompt; those of each completion, one at least, which may be empty; the number of its prompt."""

    prompts: list[np.ndarray]
    completions: list[np.ndarray]
    owners: list[int]

    @classmethod
    def of(cls, group: np.ndarray, branch: np.ndarray) -> "Parts":
        """Those of (R, S) slots, see `prefix.Layout`."""
        group, branch = group.ravel(), branch.ravel()
        prompts, completions, owners = [], [], []
        for number in range(group.max() + 1):
            slots = np.flatnonzero(group == number)  # they lie together: the prompt first, then branch after branch
            shared = int((branch[slots] == 0).sum())
            own = slots[shared:]
            parts = np.split(own, np.flatnonzero(np.diff(branch[own])) + 1) if len(own) else [own]
            prompts.append(slots[:shared])
            completions += parts
            owners += [number] * len(parts)
        return cls(prompts, completions, owners)

    def rows(self) -> list[np.ndarray]:
        return [np.concatenate([self.prompts[owner], own]) for owner, own in zip(self.owners, self.completions)]

    def cheapest(self, device: str) -> Way:
        """Args: device: its type, e.g. `cuda`."""
        row, prompt, own = (_longest(slots) for slots in (self.rows(), self.prompts, self.completions))
        prompts, completions = len(self.prompts), len(self.completions)
        as_rows = Way(True, completions * row**2, 0, completions * row)
        masked = completions * own * (prompt + own)
        as_branches = Way(False, prompts * prompt**2, masked, prompts * prompt + completions * (prompt + own))
        return min(as_rows, as_branches, key=lambda way: way.cost(device))


def _longest(rows: list[np.ndarray]) -> int:
    return max(1, max(map(len, rows)))


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """Padded with slot 0: what stands there is neither seen nor kept."""
    padded = np.zeros((len(rows), _longest(rows)), dtype=np.int64)
    for number, slots in enumerate(rows):
        padded[number, : len(slots)] = slots
    return padded


def branches_of(group: np.ndarray, branch: np.ndarray, device: torch.device) -> Branches:
    """The branches of (R, S) slots, see `prefix.Layout`."""
    parts = Parts.of(group, branch)
    if parts.cheapest(device.type).as_rows:
        blocks = [parts.rows()]
        prompts, queries, seen = np.zeros((0, 0), dtype=np.int64), _padded(blocks[0]), None
        keys = queries
    else:
        blocks = [parts.prompts, parts.completions]
        prompts, queries = map(_padded, blocks)
        owner, width = np.array(parts.owners), prompts.shape[1]
        keys = np.concatenate([prompts[owner], queries], axis=1)
        seen = np.tril(np.ones((queries.shape[1], keys.shape[1]), dtype=bool), width)
        lengths = np.array([len(slots) for slots in parts.prompts])[owner, None]
        if (lengths < width).any():
            column = np.arange(keys.shape[1])
            seen = seen & ((column < lengths) | (column >= width))[:, None, None, :]

    place, start = np.zeros(group.size, dtype=np.int64), 0
    for rows in blocks:
        width = _longest(rows)
        for number, slots in enumerate(rows):
            place[slots] = start + number * width + np.arange(len(slots))
        start += len(rows) * width
    arrays = (prompts, queries, keys, seen, place)
    return Branches(*(None if x is None else torch.from_numpy(x).to(device) for x in arrays))


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
    shared = branches.prompts

    def unpacked(x: Tensor, own: Tensor) -> list[Tensor]:
        """Those of the prompts, and of `own`, each (rows, heads, columns, size)."""
        slots = x.transpose(1, 2).flatten(0, 1)
        picked = slots.index_select(0, torch.cat([shared.flatten(), own.flatten()]))
        both = picked.split([shared.numel(), own.numel()])
        return [y.unflatten(0, where.shape).transpose(1, 2) for y, where in zip(both, (shared, own)) if where.numel()]

    q, k, v = unpacked(query, branches.queries), unpacked(key, branches.keys), unpacked(value, branches.keys)
    options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    causal = branches.seen is None
    states = [scaled_dot_product_attention(q[-1], k[-1], v[-1], attn_mask=branches.seen, is_causal=causal, **options)]
    if shared.numel():
        states.insert(0, scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True, **options))
    slots = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in states])
    rows, _, columns, _ = query.shape
    return slots.index_select(0, branches.place).unflatten(0, (rows, columns)).transpose(1, 2)


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
