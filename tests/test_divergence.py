"""k1, k2 and k3 of a query against closed forms worked out here, against float64 autograd, and Prop. 1."""

import math

import pytest
import torch
from helpers import token_logps

from erpo_trl.query.divergence import query_kl
from erpo_trl.query.likelihood import scored_token_mask

LEVELS = ["token", "sequence", "sequence_mean"]


def kl(logps, ref, mask=None, estimator="k3", level="token"):
    mask = torch.ones_like(logps, dtype=torch.bool) if mask is None else mask
    return query_kl(logps, ref, mask, estimator, level.split("_")[0], length_normalize=level == "sequence_mean")


def single(x: float, estimator: str, level: str = "token", dtype=torch.float64):
    """Value and gradient with respect to the policy log-prob of one token with log-ratio x."""
    logp = torch.full((1, 1), -3.0, dtype=dtype, requires_grad=True)
    value = kl(logp, logp.detach() + x, estimator=estimator, level=level)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    return value.item(), gradient.item()


@pytest.mark.parametrize("shift, expected", [(1.0, math.e - 2), (-1.0, 1 / math.e)])
@pytest.mark.parametrize("level", ["token", "sequence_mean"])
def test_k3_of_a_reference_shifted_by_one_nat(shift, expected, level):
    """x = +1 on every token is e - 2 = 0.718282 and x = -1 is 1/e = 0.367879: this fixes the sign of x."""
    logps = -torch.rand(3, 7, dtype=torch.float64)
    torch.testing.assert_close(kl(logps, logps + shift, level=level), torch.full((3,), expected, dtype=torch.float64))


@pytest.mark.parametrize("x", [-2.0, -0.5, 0.0, 0.25, 3.0])
@pytest.mark.parametrize("estimator, formula", [("k1", lambda x: -x), ("k2", lambda x: x * x / 2), ("k3", lambda x: math.exp(x) - x - 1)])  # fmt: skip
def test_estimators_of_one_token(x, estimator, formula):
    """k1 = -x, k2 = x^2/2 and k3 = e^x - x - 1, as printed in the paper."""
    for level in LEVELS:
        assert single(x, estimator, level)[0] == pytest.approx(formula(x), abs=1e-12)


@pytest.mark.parametrize("level", LEVELS)
def test_k3_at_a_drift_of_ten_nats(level):
    """k3(10) = 22015.466 with slope -22025.466 w.r.t. the policy log-prob: no clamp below the stated bound of 20."""
    value, gradient = single(10.0, "k3", level)
    assert value == pytest.approx(22015.465795, abs=1e-5)
    assert gradient == pytest.approx(-22025.465795, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("x", [-100.0, 100.0])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_finite_value_and_gradient_far_away(estimator, level, x, dtype):
    """A policy 100 nats away must still be pulled back: never inf, NaN or a zero gradient."""
    value, gradient = single(x, estimator, level, dtype)
    assert math.isfinite(value) and math.isfinite(gradient)
    assert gradient != 0.0
    if estimator != "k1":
        assert value > 0.0
        assert gradient * x < 0.0  # descending moves the log-prob towards the reference


@pytest.mark.parametrize("per_token", [10.0, -10.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_finite_for_many_drifting_tokens(level, per_token):
    """Forty tokens of ten nats sum to 400, where e^x overflows float32: the tail is linear."""
    logps = torch.full((1, 40), -12.0, requires_grad=True)
    value = kl(logps, logps.detach() + per_token, level=level)
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(logps.grad).all()
    assert (logps.grad * per_token < 0).all()


@pytest.mark.parametrize("bound", [20.0, -20.0])
@pytest.mark.parametrize("level", ["sequence", "sequence_mean"])
def test_linear_tail_is_continuous_in_value_and_slope(level, bound):
    """Beyond |x| = 20 k3 continues on its tangent: value and slope agree from both sides, then the slope is constant."""
    inside, slope_inside = single(bound * (1 - 1e-9), "k3", level)
    outside, slope_outside = single(bound * (1 + 1e-9), "k3", level)
    assert outside == pytest.approx(inside, rel=1e-6)
    assert slope_outside == pytest.approx(slope_inside, rel=1e-6)
    _, slope_far = single(bound * 3, "k3", level)
    assert slope_far == pytest.approx(1 - math.exp(bound), rel=1e-9)
    value_far, _ = single(bound * 3, "k3", level)
    at_bound = math.exp(bound) - bound - 1
    assert value_far == pytest.approx(at_bound + (math.exp(bound) - 1) * 2 * bound, rel=1e-9)


def printed_formula(logps, ref, mask, estimator, level):
    """Section 2 of the design, term by term in python, for float64 autograd to differentiate."""
    k = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": lambda x: torch.exp(x) - x - 1}[estimator]
    out = []
    for q in range(logps.size(0)):
        terms = [ref[q, t] - logps[q, t] for t in range(logps.size(1)) if mask[q, t]]
        if level == "token":
            out.append(sum(k(x) for x in terms) / len(terms))
        else:
            total = sum(terms)
            out.append(k(total / len(terms) if level == "sequence_mean" else total))
    return torch.stack(out)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_value_and_gradient_against_autograd(estimator, level):
    """Random log-probs and a ragged mask: value and gradient are those of the printed objective."""
    generator = torch.Generator().manual_seed(0)
    logps = -2 * torch.rand(4, 6, generator=generator, dtype=torch.float64)
    ref = -2 * torch.rand(4, 6, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 1]]).bool()
    weights = torch.rand(4, generator=generator, dtype=torch.float64)
    ours, theirs = logps.clone().requires_grad_(), logps.clone().requires_grad_()
    value = kl(ours, ref, mask, estimator, level)
    expected = printed_formula(theirs, ref, mask, estimator, level)
    torch.testing.assert_close(value, expected)
    (value * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert (ours.grad[~mask] == 0).all()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_masked_positions_may_hold_anything(estimator, level, garbage):
    """NaN times 0 is NaN: masked log-probs must be left out of the sum and of the gradient, not multiplied away."""
    logps = torch.tensor([[garbage, -1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[garbage, -1.5, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[False, True, True]])
    value = kl(logps, ref, mask, estimator, level)
    clean = logps.detach()[:, 1:].clone().requires_grad_()
    expected = kl(clean, ref[:, 1:], mask[:, 1:], estimator, level)
    torch.testing.assert_close(value, expected)
    value.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(logps.grad, torch.nn.functional.pad(clean.grad, (1, 0)))


def test_masked_mean_counts_scored_tokens_only():
    """[NaN, -1, -2] with the mask [0, 1, 1] has the mean -1.5: k1 against a zero reference is that mean."""
    logps = torch.tensor([[float("nan"), -1.0, -2.0]])
    value = kl(logps, torch.zeros(1, 3), torch.tensor([[False, True, True]]), "k1")
    assert value.item() == pytest.approx(-1.5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_query_without_scored_token(estimator, level):
    """A one-token prompt has no likelihood: 0, with a gradient path, and its neighbour is unaffected."""
    logps = torch.tensor([[-1.0, -2.0], [-1.0, -2.0]], requires_grad=True)
    ref = torch.tensor([[-9.0, 5.0], [-1.5, -1.5]])
    mask = torch.tensor([[False, False], [True, True]])
    value = kl(logps, ref, mask, estimator, level)
    assert value[0].item() == 0.0
    torch.testing.assert_close(value[1:], kl(logps[1:], ref[1:], mask[1:], estimator, level))
    value.sum().backward()
    assert (logps.grad[0] == 0).all()


def test_empty_batch():
    """A rank may hold no query of a step: the answer is empty, not an error."""
    assert query_kl(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3).bool()).shape == (0,)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_zero_at_the_reference(estimator):
    """R-hat is 0 where policy and reference agree, at every level."""
    logps = -torch.rand(2, 5)
    for level in LEVELS:
        assert (kl(logps, logps, estimator=estimator, level=level) == 0).all()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_never_negative(estimator):
    """k2 and k3 are distances: rounding near 0 must not turn them negative."""
    generator = torch.Generator().manual_seed(1)
    logps = -torch.rand(64, 9, generator=generator)
    ref = logps + 1e-4 * torch.randn(64, 9, generator=generator)
    for level in LEVELS:
        assert (kl(logps, ref, estimator=estimator, level=level) >= 0).all()


def test_small_drift_keeps_its_digits():
    """e^x - 1 - x cancels in float32 for small x; with x = 1e-3 half of x^2/2 must not be lost (expm1)."""
    logps = torch.full((1, 1), -1.0)
    ref = logps + 1e-3
    x = (ref - logps).double()
    expected = (torch.expm1(x) - x).item()
    assert kl(logps, ref).item() == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_proposition_one(estimator):
    """Prop. 1: w.r.t. each token's log-prob k2/sequence has slope l_theta - l_0 and k3/sequence 1 - e^X."""
    generator = torch.Generator().manual_seed(2)
    logps = (-torch.rand(3, 4, generator=generator, dtype=torch.float64)).requires_grad_()
    ref = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    kl(logps, ref, estimator=estimator, level="sequence").sum().backward()
    drift = (logps - ref).detach().sum(1, keepdim=True)  # l_theta - l_0 = -X
    slope = drift if estimator == "k2" else 1 - torch.exp(-drift)
    torch.testing.assert_close(logps.grad, slope.expand(3, 4))


def test_unknown_names_are_refused():
    """A typing error must not fall through to some default; the message tells what was given."""
    args = (torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1).bool())
    with pytest.raises((ValueError, KeyError), match="k4"):
        query_kl(*args, "k4", "token")
    with pytest.raises((ValueError, KeyError), match="word"):
        query_kl(*args, "k3", "word")


def test_mixed_temperatures_would_show():
    """Logits [2, 1, 0], token 0: at temperature 0.5 against a reference at 1.0 the k3 is 0.032130, and 0 when both agree."""
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    cold, warm = (logits / 0.5).log_softmax(0)[0].view(1, 1), logits.log_softmax(0)[0].view(1, 1)
    assert cold.item() == pytest.approx(-0.142932, abs=1e-6) and warm.item() == pytest.approx(-0.407606, abs=1e-6)
    assert kl(cold, warm).item() == pytest.approx(0.032130, abs=1e-6)
    assert kl(cold, cold).item() == 0.0


@pytest.mark.parametrize(
    "attention, expected",
    [
        ([1, 1, 1, 1], [1, 1, 1]),
        ([0, 0, 1, 1], [0, 0, 1]),
        ([0, 0, 0, 1], [0, 0, 0]),
        ([1, 1, 0, 0], [1, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0]),
    ],
)
def test_first_real_token_is_never_scored(attention, expected):
    """x_1 has no context; under left padding a pad position would otherwise predict it."""
    mask = scored_token_mask(torch.tensor([attention]))
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[bool(e) for e in expected]]


def test_sequence_gradient_through_a_model():
    """Prop. 1 end to end: with k2/sequence the parameter gradient is (l_theta - l_0) times the gradient of l_theta."""
    from helpers import tiny_model

    model = tiny_model("qwen2").double().eval()
    ids = [20, 31, 42, 53, 64]
    with torch.no_grad():
        reference = token_logps(model, ids) + torch.tensor([0.3, -0.1, 0.2, 0.4], dtype=torch.float64)
    logps = token_logps(model, ids)
    parameters = list(model.parameters())
    likelihood_gradient = torch.autograd.grad(logps.sum(), parameters, retain_graph=True)
    penalty = kl(logps[None], reference[None], estimator="k2", level="sequence").sum()
    penalty_gradient = torch.autograd.grad(penalty, parameters)
    drift = (logps.sum() - reference.sum()).item()
    for found, expected in zip(penalty_gradient, likelihood_gradient):
        torch.testing.assert_close(found, drift * expected, atol=2e-6, rtol=1e-5)  # RMSNorm works in float32
