"""Trust regions as functions: every weight is the gradient of its printed objective, and the papers' facts hold."""

import itertools
import math

import pytest
import torch

from erpo_trl.policy.trust_region import REGIONS, Move, RegionParams, bernoulli_kl, gradient_weight, objective, push
from erpo_trl.report.trust_regions import gradient_weight_grid, plot_gradient_weights

PARAMS = RegionParams(delta=0.2, ratio_cap=3.0, epsilon=0.3)
MUS = (1e-4, 0.02, 0.1, 0.4, 0.75, 0.97)
PIS = (2e-4, 0.01, 0.1, 0.35, 0.7, 0.99)
ADVANTAGES = (-2.0, -0.5, 0.5, 1.0, 3.0)
GRID = torch.tensor(list(itertools.product(MUS, PIS, ADVANTAGES)), dtype=torch.float64)


def moves(mu, pi):
    mu, pi = torch.as_tensor(mu, dtype=torch.float64), torch.as_tensor(pi, dtype=torch.float64)
    return pi.log() - mu.log(), mu.log()


def weight(region, mu, pi, advantage, params=PARAMS):
    log_ratio, log_mu = (x.reshape(1, -1) for x in moves(mu, pi))
    advantage = torch.as_tensor(advantage, dtype=torch.float64).reshape(1, -1)
    return gradient_weight(region, log_ratio, log_mu, advantage, params).squeeze()


@pytest.mark.parametrize("region", REGIONS)
def test_push_is_the_gradient_of_the_objective(region):
    """Float64 autograd of the objective with respect to r, over a grid of (μ, π, A) away from the kink at π = μ."""
    mu, pi, advantage = (x.reshape(1, -1) for x in GRID[GRID[:, 0] != GRID[:, 1]].T)
    log_ratio, log_mu = moves(mu, pi)
    log_ratio.requires_grad_()
    [slope] = torch.autograd.grad(objective(region, log_ratio, log_mu, advantage, PARAMS).sum(), log_ratio)
    # d/d(log r) = r · d/dr
    torch.testing.assert_close(
        slope / log_ratio.exp(), push(region, log_ratio, log_mu, advantage, PARAMS), rtol=1e-10, atol=1e-12
    )


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
    assert gradient_weight(region, log_ratio, log_mu, zero, PARAMS).item() == 1
    expected = -0.3 / 0.2 if region == "drpo_no_advantage" else 0.0
    assert push(region, log_ratio, log_mu, zero, PARAMS).item() == pytest.approx(expected)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_stay_finite(region, dtype):
    """Log-ratios of ±100 and μ down to 1e-30: neither NaN nor inf in weight, push, r·push, objective or gradient."""
    log_ratio = torch.tensor([[-100.0, -30.0, 0.0, 30.0, 100.0]], dtype=dtype).repeat(3, 1)
    log_mu = torch.tensor([[1e-30], [1e-8], [1.0]], dtype=dtype).log().expand(3, 5)
    for a in (-1.0, 0.0, 1.0):
        advantage = torch.full((3, 1), a, dtype=dtype)
        move = log_ratio.clone().requires_grad_()
        value = objective(region, move, log_mu, advantage, PARAMS)
        [slope] = torch.autograd.grad(value.sum(), move, allow_unused=True)
        pushed = push(region, log_ratio, log_mu, advantage, PARAMS)
        for found in (value, slope, pushed, pushed * Move(log_ratio, log_mu).r):
            assert torch.isfinite(found).all()
        assert torch.isfinite(gradient_weight(region, log_ratio, log_mu, advantage, PARAMS)).all()


def test_bernoulli_kl():
    """Against the formula, and finite where the policy is certain."""
    log_ratio, log_mu = moves([0.1, 0.4, 0.5], [0.4, 0.1, 0.5])
    expected = [_kl(0.1, 0.4), _kl(0.4, 0.1), 0.0]
    assert bernoulli_kl(Move(log_ratio, log_mu)).tolist() == pytest.approx(expected)
    assert torch.isfinite(bernoulli_kl(Move(*moves([0.5], [1.0])))).all()


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
    path = plot_gradient_weights(tmp_path / "weights.png", PARAMS)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000
