"""Trust regions as functions: every weight is the gradient of its printed objective, and the papers' facts hold."""

import itertools
import math

import pytest
import torch

from erpo_trl.policy.metrics import RegionMetrics
from erpo_trl.policy.radius import adapt_radius
from erpo_trl.policy.topk import split_sampled
from erpo_trl.policy.trust_region import (
    REGIONS,
    Move,
    RegionParams,
    TopK,
    bernoulli_kl,
    gradient_weight,
    objective,
    push,
    topk_kl,
    topk_tv,
)
from erpo_trl.report.trust_regions import gradient_weight_grid, plot_gradient_weights

PARAMS = RegionParams(delta=0.2, ratio_cap=3.0, epsilon=0.3)
MUS = (1e-4, 0.02, 0.1, 0.4, 0.75, 0.97)
PIS = (2e-4, 0.01, 0.1, 0.35, 0.7, 0.99)
ADVANTAGES = (-2.0, -0.5, 0.5, 1.0, 3.0)
GRID = torch.tensor(list(itertools.product(MUS, PIS, ADVANTAGES)), dtype=torch.float64)


def moves(mu, pi):
    mu, pi = torch.as_tensor(mu, dtype=torch.float64), torch.as_tensor(pi, dtype=torch.float64)
    return pi.log() - mu.log(), mu.log()


def unlisted(log_mu):
    """No token beside the sampled one is listed: the top-K regions are then the binary ones."""
    none = torch.zeros(*log_mu.shape, 1, dtype=log_mu.dtype)
    return TopK(none, none, none.bool())


def weight(region, mu, pi, advantage, params=PARAMS):
    log_ratio, log_mu = (x.reshape(1, -1) for x in moves(mu, pi))
    advantage = torch.as_tensor(advantage, dtype=torch.float64).reshape(1, -1)
    return gradient_weight(region, log_ratio, log_mu, advantage, params, unlisted(log_mu)).squeeze()


@pytest.mark.parametrize("region", REGIONS)
def test_push_is_the_gradient_of_the_objective(region):
    """Float64 autograd of the objective with respect to r, over a grid of (μ, π, A) away from the kink at π = μ."""
    mu, pi, advantage = (x.reshape(1, -1) for x in GRID[GRID[:, 0] != GRID[:, 1]].T)
    log_ratio, log_mu = moves(mu, pi)
    log_ratio.requires_grad_()
    inputs = (log_ratio, log_mu, advantage, PARAMS, unlisted(log_mu))
    [slope] = torch.autograd.grad(objective(region, *inputs).sum(), log_ratio)
    # d/d(log r) = r · d/dr
    torch.testing.assert_close(slope / log_ratio.exp(), push(region, *inputs), rtol=1e-10, atol=1e-12)


PRINTED = {
    "none": lambda r, mu, pi, a: 1.0,
    "spo": lambda r, mu, pi, a: 1 - math.copysign(1, a * (r - 1)) * abs(r - 1) / 0.3,
    "drpo": lambda r, mu, pi, a: 1 - math.copysign(1, a * (r - 1)) * abs(pi - mu) / 0.2,
    "drpo_no_advantage": lambda r, mu, pi, a: 1 - (r - 1) * mu / (0.2 * a),
    "drpo_tv": lambda r, mu, pi, a: 1 - 5 * math.copysign(1, a * (r - 1)),
    "drpo_kl": lambda r, mu, pi, a: 1 + 5 * math.copysign(1, a) / r,
    "drpo_k3": lambda r, mu, pi, a: 1 - 5 * math.copysign(1, a) * (1 - 1 / r),
    "dppo_tv": lambda r, mu, pi, a: 0.0 if (pi - mu > 0.2 if a > 0 else pi - mu < -0.2) else min(r, 3.0) / r,
    "dppo_kl": lambda r, mu, pi, a: 0.0 if _kl(mu, pi) > 0.2 and (pi > mu if a > 0 else pi < mu) else min(r, 3.0) / r,
    "drpo_mask": lambda r, mu, pi, a: (
        1 - math.copysign(1, a * (r - 1)) * abs(pi - mu) / 0.2 if (pi - mu > 0.2 if a > 0 else pi - mu < -0.2) else 1.0
    ),
}
PRINTED |= {"dppo_topk_tv": PRINTED["dppo_tv"], "dppo_topk_kl": PRINTED["dppo_kl"]}


def _kl(mu, pi):
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def test_every_region_has_a_printed_weight():
    assert set(PRINTED) == set(REGIONS)


@pytest.mark.parametrize("region", PRINTED)
def test_weights_are_the_printed_ones(region):
    """The table of the design in plain arithmetic, written a second time."""
    rows = [row for row in GRID.tolist() if row[0] != row[1]]
    found = weight(region, *zip(*rows))
    expected = [PRINTED[region](pi / mu, mu, pi, a) for mu, pi, a in rows]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_drpo_bounds_and_zero_crossing():
    """Weights stay in [1 - 1/δ, 1 + 1/δ] and vanish at |π - μ| = δ for every |A|."""
    mu, pi, advantage = GRID.T
    found = weight("drpo", mu, pi, advantage)
    assert found.min() >= 1 - 1 / 0.2 and found.max() <= 1 + 1 / 0.2
    for a in (0.01, 1.0, 50.0):
        assert weight("drpo", 0.3, 0.5, a) == pytest.approx(0.0, abs=1e-12)
        assert weight("drpo", 0.5, 0.3, -a) == pytest.approx(0.0, abs=1e-12)
        assert weight("drpo", 0.3, 0.6, a) == pytest.approx(-0.5)


def test_spo_has_no_bound_in_the_ratio():
    """A rare token that gains 1e-3 in probability gets a weight of -3330 from SPO and 0.995 from DRPO."""
    assert weight("spo", 1e-6, 1e-3 + 1e-6, 1.0) == pytest.approx(1 - 1000 / 0.3)
    assert weight("drpo", 1e-6, 1e-3 + 1e-6, 1.0) == pytest.approx(0.995)


@pytest.mark.parametrize("mu, pi, dropped_for", [(0.10, 0.40, 1.0), (0.40, 0.10, -1.0)])
def test_dppo_masks_only_what_moves_further_out(mu, pi, dropped_for):
    """Past δ = 0.2 the token is dropped when A pushes on, and kept when A pulls back."""
    params = RegionParams(delta=0.2)
    assert weight("dppo_tv", mu, pi, dropped_for, params) == 0
    assert weight("dppo_tv", mu, pi, -dropped_for, params) == 1
    assert weight("dppo_kl", mu, pi, dropped_for, params) == 0
    assert weight("dppo_kl", mu, pi, -dropped_for, params) == 1


def test_asymmetric_radii():
    """`delta_low` bounds falls and `delta_high` rises."""
    params = RegionParams(delta=0.2, delta_low=0.35, delta_high=0.1)
    assert weight("dppo_tv", 0.1, 0.25, 1.0, params) == 0
    assert weight("dppo_tv", 0.4, 0.1, -1.0, params) == 1
    assert weight("drpo_mask", 0.1, 0.25, 1.0, params) == pytest.approx(0.25)


@pytest.mark.parametrize("region", sorted(set(REGIONS) - {"drpo_kl"}))
def test_no_move_is_plain_policy_gradient(region):
    """At π = μ every region that penalises the move weighs 1."""
    assert weight(region, 0.3, 0.3, 1.5) == 1
    assert weight(region, 0.3, 0.3, -0.5) == 1


def test_forward_kl_pulls_even_where_nothing_moved():
    """A sample of the forward KL has mean 0 but not value 0: at r = 1 its weight is 1 + c·sign(A)."""
    assert weight("drpo_kl", 0.3, 0.3, 1.0) == 6
    assert weight("drpo_kl", 0.3, 0.3, -1.0) == -4


@pytest.mark.parametrize("region", REGIONS)
def test_zero_advantage(region):
    """A = 0 weighs 1 by definition and pushes nothing, except without |A|, where the penalty's own gradient stays."""
    log_ratio, log_mu = (x.reshape(1, 1) for x in moves(0.2, 0.5))
    zero = torch.zeros(1, 1, dtype=torch.float64)
    inputs = (log_ratio, log_mu, zero, PARAMS, unlisted(log_mu))
    assert gradient_weight(region, *inputs).item() == 1
    expected = -0.3 / 0.2 if region == "drpo_no_advantage" else 0.0
    assert push(region, *inputs).item() == pytest.approx(expected)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_stay_finite(region, dtype):
    """Log-ratios of ±100 and μ down to 1e-30: neither NaN nor inf in weight, push, r·push, objective or gradient."""
    log_ratio = torch.tensor([[-100.0, -30.0, 0.0, 30.0, 100.0]], dtype=dtype).repeat(3, 1)
    log_mu = torch.tensor([[1e-30], [1e-8], [1.0]], dtype=dtype).log().expand(3, 5)
    for a in (-1.0, 0.0, 1.0):
        advantage = torch.full((3, 1), a, dtype=dtype)
        move = log_ratio.clone().requires_grad_()
        topk = TopK(log_mu.unsqueeze(-1), (log_mu + log_ratio).unsqueeze(-1), torch.ones(3, 5, 1).bool())
        value = objective(region, move, log_mu, advantage, PARAMS, topk)
        [slope] = torch.autograd.grad(value.sum(), move, allow_unused=True)
        pushed = push(region, log_ratio, log_mu, advantage, PARAMS, topk)
        for found in (value, slope, pushed, pushed * Move(log_ratio, log_mu).r):
            assert torch.isfinite(found).all()
        assert torch.isfinite(gradient_weight(region, log_ratio, log_mu, advantage, PARAMS, topk)).all()


def test_bernoulli_kl():
    """Against the formula, and finite where the policy is certain."""
    log_ratio, log_mu = moves([0.1, 0.4, 0.5], [0.4, 0.1, 0.5])
    expected = [_kl(0.1, 0.4), _kl(0.4, 0.1), 0.0]
    assert bernoulli_kl(Move(log_ratio, log_mu)).tolist() == pytest.approx(expected)
    assert torch.isfinite(bernoulli_kl(Move(*moves([0.5], [1.0])))).all()


def _two_policies(k, vocabulary=7, tokens=5, seed=3):
    """Distributions μ and π over a vocabulary, a sampled token each, and the top-K sets an engine would list."""
    generator = torch.Generator().manual_seed(seed)
    log_mu, log_pi = (
        (2 * torch.randn(1, tokens, vocabulary, generator=generator, dtype=torch.float64)).log_softmax(-1)
        for _ in range(2)
    )
    sampled = torch.tensor([[0, 6, 3, 2, 5]])
    ids = log_mu.topk(k, dim=-1).indices
    own_mu, own_pi = (x.gather(-1, sampled.unsqueeze(-1)).squeeze(-1) for x in (log_mu, log_pi))
    topk = TopK(log_mu.gather(-1, ids), log_pi.gather(-1, ids), ids != sampled.unsqueeze(-1))
    return log_mu.exp()[0], log_pi.exp()[0], sampled[0], ids[0], Move(own_pi - own_mu, own_mu, topk)


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_topk_divergences(k):
    """Against the distributions cut to the listed tokens, the sampled one and the rest; K = vocabulary is the whole."""
    mu, pi, sampled, ids, move = _two_policies(k)
    for place in range(len(mu)):
        kept = sorted({int(sampled[place]), *ids[place].tolist()})
        cut = [[*(p[place, i].item() for i in kept), 1 - sum(p[place, i].item() for i in kept)] for p in (mu, pi)]
        tv = 0.5 * sum(abs(m - p) for m, p in zip(*cut))
        kl = sum(m * math.log(m / p) for m, p in zip(*cut) if m > 1e-12)
        assert topk_tv(move)[0, place].item() == pytest.approx(tv)
        assert topk_kl(move)[0, place].item() == pytest.approx(kl)
    if k == 7:
        whole = (mu * (mu.log() - pi.log())).sum(-1)
        assert topk_kl(move)[0].tolist() == pytest.approx(whole.tolist())


def test_topk_sees_what_the_sampled_token_does_not():
    """The sampled token kept its 0.5, the others swapped 0.4 and 0.1: outside for Top-K, though r = 1 masks nothing."""
    half, one = torch.tensor([[0.5]], dtype=torch.float64).log(), torch.zeros(1, 1, dtype=torch.float64)
    listed = torch.tensor([[[0.4, 0.1]]], dtype=torch.float64).log()
    topk = TopK(listed, listed.flip(-1), torch.ones(1, 1, 2).bool())
    assert topk_tv(Move(one, half, topk)).item() == pytest.approx(0.3)
    assert topk_kl(Move(one, half, topk)).item() == pytest.approx(0.3 * math.log(4))
    assert not REGIONS["dppo_tv"].outside(Move(one, half), PARAMS).item()
    assert REGIONS["dppo_topk_tv"].outside(Move(one, half, topk), PARAMS).item()
    # The same with the sampled token a little up: only the whole says that it is far out
    up = torch.tensor([[0.52]], dtype=torch.float64).log()
    inputs = (up - half, half, torch.ones(1, 1, dtype=torch.float64), PARAMS)
    assert (
        gradient_weight("dppo_tv", *inputs).item() == 1 and gradient_weight("dppo_topk_tv", *inputs, topk).item() == 0
    )
    assert gradient_weight("dppo_topk_tv", inputs[0], half, -inputs[2], PARAMS, topk).item() == 1


def test_split_sampled():
    """Sampled log-probs in order, the K likeliest in rank order, padding where an engine lists fewer or knows none."""
    sampled, [(ids, logps)] = split_sampled([[[-0.1, -2.5, -9.0], [-0.5, None]]], [[[5, 7, 9], [4, 3]]], [[9, 4]], 2)
    assert sampled == [[-9.0, -0.5]]
    assert ids.tolist() == [[5, 7], [4, -1]] and logps.tolist() == [[pytest.approx(-0.1), -2.5], [-0.5, 0.0]]
    # Tensors are taken too, and a repeated id counts once
    ids, logps = torch.tensor([[5, 7, 7]]), torch.tensor([[-0.5, -1.0, -1.0]])
    _, [(ids, logps)] = split_sampled([logps], [ids], [torch.tensor([7])], 3)
    assert ids.tolist() == [[5, 7, -1]] and logps.tolist() == [[-0.5, -1.0, 0.0]]
    with pytest.raises(ValueError, match="token 0: 1 logprobs for 2 logprob_token_ids"):
        split_sampled([[[-0.1]]], [[[5, 6]]], [[5]], 1)
    with pytest.raises(ValueError, match="completion 0, token 1: logprob_token_ids does not list the sampled id 8"):
        split_sampled([[[-0.1], [-0.2]]], [[[5], [6]]], [[5, 8]], 1)
    with pytest.raises(ValueError, match="completion 0: logprobs for 1 tokens and logprob_token_ids for 1, but 2"):
        split_sampled([[[-0.1]]], [[[5]]], [[5, 8]], 1)


@pytest.mark.parametrize(
    "region, mu, pi, params, outside",
    [
        ("none", 0.1, 0.9, PARAMS, False),
        ("spo", 0.1, 0.12, PARAMS, False),  # |r - 1| = 0.2 < 0.3
        ("spo", 1e-4, 2e-4, PARAMS, True),
        ("drpo", 1e-4, 2e-4, PARAMS, False),
        ("drpo", 0.3, 0.55, PARAMS, True),
        ("dppo_tv", 0.55, 0.3, PARAMS, True),
        ("dppo_tv", 0.55, 0.3, RegionParams(delta=0.2, delta_low=0.3), False),
        ("dppo_kl", 0.3, 0.55, PARAMS, False),  # |π - μ| = 0.25, but 0.13 nats
        ("dppo_kl", 0.3, 0.65, PARAMS, True),
    ],
)
def test_each_region_has_its_own_boundary(region, mu, pi, params, outside):
    """What `violation_rate` counts: past this region's boundary, whichever way A points."""
    log_ratio, log_mu = (x.reshape(1, 1) for x in moves(mu, pi))
    assert REGIONS[region].outside(Move(log_ratio, log_mu), params).item() is outside


class _Alone:
    """An accelerator of one process."""

    gather = staticmethod(lambda x: x)


def test_metrics_of_micro_batches():
    """Two micro-batches of unequal size make one step; masked tokens count for nothing."""
    metrics = RegionMetrics()
    pairs = [([0.1, 0.5, 0.2], [0.1, 0.9, 0.1], [1, 1, 1]), ([0.3, 0.01], [0.3001, 0.99], [1, 0])]
    for mu, pi, kept in pairs:
        log_ratio, log_mu = (x.reshape(1, -1) for x in moves(mu, pi))
        move, advantage = Move(log_ratio, log_mu), torch.ones(1, 1, dtype=torch.float64)
        metrics.add(
            move,
            advantage,
            REGIONS["drpo"].push(move, advantage, PARAMS),
            REGIONS["drpo"].outside(move, PARAMS),
            torch.tensor([kept]).bool(),
        )
    assert metrics.micro_batches == 2
    step = metrics.end_step(_Alone())
    assert metrics.micro_batches == 0
    assert (step.tokens, step.violations, step.corrective) == (4, 1, 1)
    assert step.signed_sum == pytest.approx(0.4 - 0.1 + 1e-4, rel=1e-5)
    assert step.shift_p99 == pytest.approx(0.4, rel=0.024)
    found = metrics.summarize()
    assert found["shift_mean"] == pytest.approx(0.5001 / 4, rel=1e-5)
    assert found["violation_rate"] == found["corrective_rate"] == 0.25
    # w = 1 - shift/δ for A = 1
    assert (found["weight_min"], found["weight_max"]) == (pytest.approx(-1.0), pytest.approx(1.5))
    assert found["ratio_max"] == pytest.approx(1.8)
    assert metrics.summarize() == {}


def test_adaptive_radius():
    """δ goes its share of the way on a log scale, settles at p99 / target, and keeps its bounds."""
    assert adapt_radius(0.4, 0.05, target=0.5, rate=1.0) == pytest.approx(0.1)
    assert adapt_radius(0.4, 0.05, target=0.5, rate=0.5) == pytest.approx(0.2)
    assert adapt_radius(0.4, 0.0, target=0.5, rate=1.0) == 0.4  # nothing moved
    assert adapt_radius(0.4, 1e-5, target=1.0, rate=1.0) == 1e-4
    assert adapt_radius(12.5, 0.9, target=0.1, rate=0.1) == 1.0
    delta = 0.3
    for _ in range(60):
        delta = adapt_radius(delta, 0.012, target=0.6, rate=0.1)
    assert delta == pytest.approx(0.02, rel=0.01)


def test_wide_region_is_none():
    """δ → ∞ leaves the plain policy gradient."""
    mu, pi, advantage = GRID.T
    torch.testing.assert_close(
        weight("drpo", mu, pi, advantage, RegionParams(delta=1e12)), torch.ones(len(GRID), dtype=torch.float64)
    )


def test_figure_shows_the_weights(tmp_path):
    """Rows are π and columns μ; the picture is written for every region and both signs of A."""
    grid = gradient_weight_grid("drpo", 1.0, PARAMS, points=10)
    # π = 0.75, μ = 0.25: 1 - 0.5/0.2; mirrored it is a converging move, 1 + 0.5/0.2
    assert grid[7, 2] == pytest.approx(-1.5) and grid[2, 7] == pytest.approx(3.5)
    assert grid.diagonal() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="dppo_topk_tv has no picture over"):
        gradient_weight_grid("dppo_topk_tv", 1.0, PARAMS)
    path = plot_gradient_weights(tmp_path / "weights.png", PARAMS)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
