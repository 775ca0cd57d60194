"""Who scores a query in a step, and for how much of it."""

import numpy as np
import pytest

from erpo_trl.query.owners import settle_owners


def settle_all(keys, scored=None):
    keys = np.array(keys)
    tokens = np.ones_like(keys) if scored is None else np.array(scored).astype(int)
    return [settle_owners(keys, tokens, rank) for rank in range(len(keys))]


def test_one_rank():
    """The first row of each query owns it whole; repeats get nothing."""
    [(owner, share, queries)] = settle_all([[7, 7, 3, 7, 3]])
    assert owner.tolist() == [True, False, True, False, False]
    assert share.tolist() == [1, 0, 1, 0, 0]
    assert queries == 2


def test_group_across_ranks():
    """Ranks that hold 3 and 1 of a query's 4 rows carry 3/4 and 1/4 of it."""
    (owner0, share0, m0), (owner1, share1, m1) = settle_all([[5, 5, 5], [5, 9, 9]])
    assert (m0, m1) == (2, 2)
    assert share0.tolist() == [0.75, 0, 0]
    assert share1.tolist() == [0.25, 1, 0]
    assert owner0.tolist() == [True, False, False]
    assert owner1.tolist() == [True, True, False]


def test_unscored_rows_and_padding_own_nothing():
    """One-token queries and rows that only pad a rank must not enter the mean."""
    (owner0, share0, m), (owner1, share1, _) = settle_all([[4, 8], [4, -1]], [[True, False], [True, False]])
    assert m == 1
    assert share0.tolist() == [0.5, 0] and share1.tolist() == [0.5, 0]
    assert not owner0[1] and not owner1[1]


def test_nothing_scored():
    """A step of one-token queries only has no owner and no division by zero."""
    [(owner, share, queries)] = settle_all([[1, 2]], [[False, False]])
    assert queries == 0 and not owner.any() and not share.any()


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_every_query_sum_to_one(seed):
    """Whatever the layout, each distinct query counts once in the step."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 6, size=(3, 8))
    scored = rng.random((3, 8)) < 0.8
    total = {}
    for rank, (owner, share, queries) in enumerate(settle_all(keys, scored)):
        assert queries == len(np.unique(keys[scored]))
        for key, part in zip(keys[rank][owner], share[owner]):
            total[key] = total.get(key, 0) + part
    assert total == pytest.approx(dict.fromkeys(np.unique(keys[scored]), 1.0))


def test_micro_batches_share_the_scoring():
    """Four groups, a row of each in every micro-batch: each micro-batch scores one query, not the first all four."""
    keys, micro_batch = np.array([[1, 2, 3, 4] * 4]), np.repeat(range(4), 4)
    owner, share, _ = settle_owners(keys, np.full((1, 16), 7), 0, micro_batch)
    assert micro_batch[owner].tolist() == [0, 1, 2, 3]
    assert sorted(keys[0][owner]) == [1, 2, 3, 4] and share[owner].tolist() == [1] * 4


def test_long_queries_are_placed_first():
    """Of queries with 10, 6 and 5 tokens in two micro-batches, the two short ones go together: 10 and 11, not 16 and 5."""
    keys, tokens = np.array([[1, 2, 3, 1, 2, 3]]), np.array([[5, 6, 10, 5, 6, 10]])
    micro_batch = np.array([0, 0, 0, 1, 1, 1])
    owner, _, _ = settle_owners(keys, tokens, 0, micro_batch)
    assert sorted(np.bincount(micro_batch[owner], weights=tokens[0][owner])) == [10, 11]
    assert sorted(keys[0][owner]) == [1, 2, 3]
