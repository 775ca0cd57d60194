"""Trust regions in training: the gradient of an off-policy step is that of the region's objective, aggregation and all."""

import copy
import itertools

import pytest
import torch
from helpers import (
    UNEQUAL,
    Recorder,
    assert_grads_close,
    distinct_queries,
    double_copy,
    fixed_rollouts,
    logged,
    lora_model,
    make_config,
    make_trainer,
    penalty_of,
    prompts_dataset,
    rows_of,
    tiny_model,
    token_logps,
)
from trl import GRPOTrainer

ALPHA, DELTA, DELTA_KL, EPSILON, CAP, COEF = 0.3, 0.004, 2e-4, 0.5, 1.2, 3.0
# The objectives once more, per token: r, mu, A -> maximised
OBJECTIVES = {
    "none": lambda r, mu, a: r * a,
    "spo": lambda r, mu, a: r * a - a.abs() * (r - 1) ** 2 / (2 * EPSILON),
    "drpo": lambda r, mu, a: r * a - a.abs() * mu * (r - 1) ** 2 / (2 * DELTA),
    "drpo_no_advantage": lambda r, mu, a: r * a - mu * (r - 1) ** 2 / (2 * DELTA),
    # Where rounding alone moved the token, |r - 1| has no slope
    "drpo_tv": lambda r, mu, a: r * a - a.abs() * COEF * torch.where((r - 1).abs() < 1e-5, 0.0, (r - 1).abs()),
    "drpo_kl": lambda r, mu, a: r * a + a.abs() * COEF * r.log(),
    "drpo_k3": lambda r, mu, a: r * a - a.abs() * COEF * (r - 1 - r.log()),
    "dppo_tv": lambda r, mu, a: torch.where(_outside(r, mu, a), 0.0, (CAP / r).clamp(max=1).detach() * r * a),
    "dppo_kl": lambda r, mu, a: torch.where(_outside_kl(r, mu, a), 0.0, (CAP / r).clamp(max=1).detach() * r * a),
    "drpo_mask": lambda r, mu, a: torch.where(
        _outside(r, mu, a), r * a - a.abs() * mu * (r - 1) ** 2 / (2 * DELTA), r * a
    ),
}


def _outside(r, mu, a):
    shift = mu * (r - 1)
    return torch.where(a > 0, shift > DELTA, shift < -DELTA)


def _outside_kl(r, mu, a):
    pi = mu * r
    kl = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
    return (kl > DELTA_KL) & torch.where(a > 0, pi > mu, pi < mu)


def settings(region, **more):
    base = {
        "trust_region": region,
        "trust_region_delta": DELTA_KL if region == "dppo_kl" else DELTA,
        "trust_region_coef": COEF,
        "trust_region_ratio_cap": CAP,
        "spo_epsilon": EPSILON,
        "query_kl_coef": ALPHA,
        "num_iterations": 2,
        "learning_rate": 0.1,
        "max_steps": 2,
    }
    return base | more


def run(tmp_path, model, region, **more):
    trainer = make_trainer(
        tmp_path, model=copy.deepcopy(model), dataset=prompts_dataset(UNEQUAL), **settings(region, **more)
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    return trainer, recorder


def expected_gradient(model, step, trainer, region):
    """Float64: minus the region's objective under the aggregation, times the query weight, plus α R̂."""
    policy = double_copy(model, step.weights)
    for parameter, template in zip(policy.parameters(), model.parameters()):
        parameter.requires_grad_(template.requires_grad)
        parameter.grad = None
    batches = [rows_of(batch) for batch in step.batches]
    reference_model = double_copy(model)
    with torch.no_grad():
        reference = {q: token_logps(reference_model, list(q)) for q in distinct_queries(batches)}
    weight = {
        tuple(row["prompt"]): w for rows, b in zip(batches, step.batches) for row, w in zip(rows, b["query_weight"])
    }
    total = 0.0
    for rows in batches:
        sums, counts = [], []
        for row in rows:
            logps = token_logps(policy, row["prompt"] + row["completion"])[len(row["prompt"]) - 1 :]
            mu = row["old"].exp()
            advantage = torch.tensor(row["advantage"], dtype=torch.float64)
            value = OBJECTIVES[region]((logps - row["old"]).exp(), mu, advantage)
            sums.append(-value.sum() * weight[tuple(row["prompt"])].double())
            counts.append(len(row["completion"]))
        if trainer.loss_type == "grpo":
            part = sum(s / c for s, c in zip(sums, counts)) / len(rows)
        elif trainer.loss_type == "dr_grpo":
            part = sum(sums) / (len(rows) * trainer.max_completion_length)
        elif trainer.loss_type == "bnpo":
            part = sum(sums) / sum(counts)
        elif trainer.loss_type == "luspo":
            part = sum(sums) / len(rows)
        else:  # dapo and cispo: tokens of the step
            part = sum(sums) / sum(len(row["completion"]) for batch in batches for row in batch) * len(batches)
        total = total + part / len(batches)
    (total + penalty_of(policy, distinct_queries(batches), reference, ALPHA)).backward()
    return policy


@pytest.mark.parametrize("region", OBJECTIVES)
def test_off_policy_gradient(tmp_path, raw_advantages, region):
    """In the second iteration π ≠ μ; query weights and Query-KL act beside the region."""
    model = tiny_model("qwen2")
    trainer, recorder = run(tmp_path, model, region)
    assert logged(trainer, "trust_region/shift_max")[1] > 1e-3
    for step in recorder.done:
        assert_grads_close(step.grads, expected_gradient(model, step, trainer, region), rel=3e-4)


@pytest.mark.parametrize("loss_type", ["dr_grpo", "bnpo", "dapo", "cispo", "luspo"])
def test_every_aggregation(tmp_path, raw_advantages, loss_type):
    """`loss_type` only says how tokens are summed; cispo's own truncation does not act."""
    model = tiny_model("qwen2")
    trainer, recorder = run(tmp_path, model, "drpo", loss_type=loss_type)
    for step in recorder.done:
        assert_grads_close(step.grads, expected_gradient(model, step, trainer, "drpo"), rel=3e-4)


def test_accumulation(tmp_path, raw_advantages):
    """Two micro-batches make the step; the region acts token by token in each."""
    model = tiny_model("qwen2")
    trainer, recorder = run(tmp_path, model, "drpo", gradient_accumulation_steps=2, steps_per_generation=4)
    for step in recorder.done:
        assert len(step.batches) == 2
        assert_grads_close(step.grads, expected_gradient(model, step, trainer, "drpo"), rel=3e-4)


def test_lora(tmp_path, raw_advantages):
    """The same with only an adapter trained."""
    model = lora_model(pretrained=True)
    trainer, recorder = run(tmp_path, model, "dppo_tv", learning_rate=2.0)
    for step in recorder.done:
        assert_grads_close(step.grads, expected_gradient(model, step, trainer, "dppo_tv"), rel=3e-4)


def test_every_pair_of_regions_differs(tmp_path, monkeypatch):
    """On the same off-policy step no two regions have the same gradient, nor any that of TRL's clip."""
    inner = GRPOTrainer._generate_and_score_completions

    def shifted(self, inputs):
        # μ is not π in the first step already, so that all regions see the same batch
        batch = inner(self, inputs)
        old = batch["old_per_token_logps"]
        sign = torch.where(torch.arange(old.shape[1]) % 2 == 0, 1.0, -1.0)
        batch["old_per_token_logps"] = (old + 0.6 * sign).clamp(max=-1e-3)
        return batch

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", shifted)
    grads = {}
    for region in ("ratio_clip", *OBJECTIVES):
        _, recorder = run(tmp_path / region, tiny_model("qwen2"), region, max_steps=1)
        grads[region] = torch.cat([g.flatten() for g in recorder.done[0].grads.values()])
    for one, other in itertools.combinations(grads, 2):
        scale = max(grads[one].abs().max(), grads[other].abs().max())
        assert (grads[one] - grads[other]).abs().max() > 1e-3 * scale, (one, other)


def test_wide_drpo_is_none(tmp_path):
    """δ → ∞: the region vanishes."""
    model = tiny_model("qwen2")
    wide, none = (
        run(tmp_path / name, model, name, trust_region_delta=delta)[1].done[-1].grads
        for name, delta in (("drpo", 1e9), ("none", None))
    )
    for name in none:
        torch.testing.assert_close(wide[name], none[name], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("region", ["spo", "drpo", "dppo_tv"])
def test_on_policy_is_refused(tmp_path, region):
    """With one update per generation r = 1 whatever the region: the user should hear it, with what to set."""
    with pytest.raises(ValueError, match="policy has not moved.*num_iterations.*steps_per_generation.*use_vllm"):
        make_trainer(tmp_path, **settings(region, num_iterations=1))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"trust_region": "dppo"}, "trust_region must be one of 'ratio_clip', 'none', 'spo'.* found 'dppo'"),
        ({"trust_region": "drpo"}, "needs its radius: set trust_region_delta"),
        ({"trust_region": "drpo", "trust_region_delta": -1}, "trust_region_delta must be > 0, found -1"),
        (
            {"trust_region": "drpo", "trust_region_ratio_cap": None},
            "trust_region_ratio_cap must be a number, found None",
        ),
        ({"trust_region": "drpo", "trust_region_delta_rate": None}, "trust_region_delta_rate must be a number"),
        ({"trust_region": "spo", "spo_epsilon": 0}, "spo_epsilon must be > 0, found 0"),
        ({"trust_region": "spo", "loss_type": "sapo"}, "loss_type='sapo' is itself a trust region"),
        ({"trust_region": "spo", "importance_sampling_level": "sequence"}, "importance_sampling_level='token'"),
        ({"trust_region": "spo", "delta": 2.0}, "delta clips TRL's ratio"),
        ({"trust_region": "spo", "beta": 0.1}, "use_bias_correction_kl multiplies the Policy-KL"),
        ({"trust_region": "drpo_tv"}, "needs its radius: set trust_region_delta"),
        ({"trust_region": "dppo_topk_kl"}, "needs its radius: set trust_region_delta"),
        ({"trust_region_delta": True}, "trust_region_delta must be a number, found True"),
        ({"trust_region_check_rollout": "no"}, "trust_region_check_rollout must be true or false, found 'no'"),
        ({"scale_rewards": "nonsense"}, "scale_rewards must be one of 'group', 'batch', 'none', found 'nonsense'"),
        (
            {"trust_region": "drpo", "trust_region_delta": 12.5, "trust_region_delta_target": 0.5},
            "set trust_region_delta to at most 1",
        ),
        ({"trust_region_topk": 0}, "trust_region_topk must be a whole number >= 1, found 0"),
        (
            {"trust_region": "spo", "trust_region_delta_target": 0.5},
            "'spo' does not bound: unset it, or use dppo_tv, drpo",
        ),
        ({"trust_region_delta_target": 0.5}, "'ratio_clip' does not bound"),
        (
            {"trust_region": "drpo", "trust_region_delta": 0.2, "trust_region_delta_target": 1.5},
            r"trust_region_delta_target must be in \(0, 1\], found 1.5",
        ),
        (
            {"trust_region": "drpo", "trust_region_delta": 0.2, "trust_region_delta_low": 0.1}
            | {"trust_region_delta_target": 0.5},
            "unset trust_region_delta_low",
        ),
    ],
)
def test_bad_settings_are_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **fields)


def test_radius_out_of_reach_is_said(tmp_path, monkeypatch):
    """δ >= 1 is allowed, as the authors run it, with a sentence."""
    said = []
    monkeypatch.setattr("erpo_trl.policy.mixin.logger.warning", said.append)
    make_trainer(tmp_path, **settings("drpo", trust_region_delta=12.5))
    assert any("12.5" in text and "out of reach" in text for text in said)


def test_metrics(tmp_path, raw_advantages):
    """Against the same quantities from plain logits."""
    model = tiny_model("qwen2")
    trainer, recorder = run(tmp_path, model, "drpo")
    step = recorder.done[1]
    policy = double_copy(model, step.weights)
    shifts, ratios, weights = [], [], []
    for batch in step.batches:
        for row in rows_of(batch):
            with torch.no_grad():
                logps = token_logps(policy, row["prompt"] + row["completion"])[len(row["prompt"]) - 1 :]
            shift = logps.exp() - row["old"].exp()
            shifts += shift.abs().tolist()
            ratios += (logps - row["old"]).exp().tolist()
            sign = 0.0 if row["advantage"] == 0 else 1.0 if row["advantage"] > 0 else -1.0
            weights += (1 - sign * shift / DELTA).tolist()
    entry = [e for e in trainer.state.log_history if "trust_region/shift_mean" in e][1]
    found = {
        name.removeprefix("trust_region/"): value for name, value in entry.items() if name.startswith("trust_region/")
    }
    n = len(shifts)
    assert found["shift_mean"] == pytest.approx(sum(shifts) / n, rel=1e-3)
    assert found["shift_max"] == pytest.approx(max(shifts), rel=1e-3)
    assert found["ratio_max"] == pytest.approx(max(ratios), rel=1e-3)
    assert found["violation_rate"] == pytest.approx(sum(s > DELTA for s in shifts) / n)
    assert found["weight_mean"] == pytest.approx(sum(weights) / n, rel=1e-3)
    assert found["weight_min"] == pytest.approx(min(weights), rel=1e-2, abs=1e-3)
    assert found["weight_max"] == pytest.approx(max(weights), rel=1e-2)
    assert found["corrective_rate"] == pytest.approx(sum(w < 0 for w in weights) / n)
    ordered = sorted(shifts)
    assert found["shift_p99"] == pytest.approx(ordered[min(n - 1, int(0.99 * n))], abs=2e-3)


def test_rollout_log_probs_are_the_behaviour_policy(tmp_path, raw_advantages):
    """A rollout's log-probs are μ, with one update per generation too."""
    model = tiny_model("qwen2")
    trainer = make_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        dataset=prompts_dataset(UNEQUAL),
        rollout=fixed_rollouts(),  # says log μ = -1 on every token
        **settings("drpo", num_iterations=1, max_steps=1, trust_region_check_rollout=False),
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    [step] = recorder.done
    for batch in step.batches:
        batch["old_per_token_logps"] = torch.full(batch["completion_ids"].shape, -1.0)
    assert_grads_close(step.grads, expected_gradient(model, step, trainer, "drpo"), rel=3e-4)


# ------------------------------------------------------------------------------------------------------- the rollout's μ
def next_token_logps(model, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(T, V) log-probs of what follows each token."""
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)


def listing_rollout(k, temperature=1.0, wrong=None):
    """A `rollout_func` that lists its k likeliest tokens and the sampled one, under weights that are not the policy's.

    The behaviour policy is the initial policy with every log-prob bent, so that |π - μ| differs from token to token.
    """
    inner = fixed_rollouts()
    behaviour = tiny_model("qwen2", seed=1)

    def rollout(prompts, trainer):
        output = inner(prompts, trainer)
        logprobs, ids = [], []
        for prompt, completion in zip(output["prompt_ids"], output["completion_ids"]):
            # Every other token is the likeliest one, so that the sampled token is among the listed, too
            for place in range(0, len(completion), 2):
                before = list(prompt) + completion[:place]
                completion[place] = int(next_token_logps(behaviour, before)[-1].argmax())
            table = next_token_logps(behaviour, list(prompt) + list(completion), temperature)[len(prompt) - 1 : -1]
            rows = [
                [*row.topk(k).indices.tolist(), *([token] if token not in row.topk(k).indices else [])]
                for row, token in zip(table, completion)
            ]
            logprobs.append([row[entry].tolist() for row, entry in zip(table, rows)])
            ids.append(rows)
        output["logprobs"], output["logprob_token_ids"] = logprobs, ids
        return wrong(output) if wrong else output

    rollout.behaviour = behaviour
    return rollout


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "cohere", "gpt2"])
@pytest.mark.parametrize("region", ["dppo_topk_tv", "dppo_topk_kl"])
def test_topk_gradient(tmp_path, monkeypatch, raw_advantages, region, kind, compact):
    """π on the listed tokens comes out of the one forward as plain logits give it: temperature, soft-capping and scale
    included, on a head that projects every position and on one that projects the labelled ones."""
    monkeypatch.setattr("trl.trainer.utils._use_triton", lambda device: compact)
    # A radius with some tokens of the untrained models on either side
    model, k, temperature, radius = tiny_model(kind), 3, 1.3, 0.07 if region == "dppo_topk_tv" else 0.15
    rollout = listing_rollout(k, temperature)
    trainer = make_trainer(
        tmp_path,
        model=copy.deepcopy(model),
        dataset=prompts_dataset(UNEQUAL),
        rollout=rollout,
        **settings(
            region,
            num_iterations=1,
            max_steps=1,
            trust_region_delta=radius,
            trust_region_topk=k,
            temperature=temperature,
            trust_region_check_rollout=False,
        ),
    )
    recorder = Recorder().attach(trainer, keep_weights=True)
    trainer.train()
    [step] = recorder.done
    assert step.forwards == [1]
    policy = double_copy(model)
    outside, loss = [], 0.0
    for batch in step.batches:
        rows = rows_of(batch)
        for row, weight in zip(rows, batch["query_weight"]):
            ids, start = row["prompt"] + row["completion"], len(row["prompt"]) - 1
            mu_table = next_token_logps(rollout.behaviour, ids, temperature)[start:-1].exp()
            logps = (policy(torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)[start:-1]
            pi_table = logps.detach().exp()
            value = 0.0
            for place, token in enumerate(row["completion"]):
                mu, pi = mu_table[place], pi_table[place]
                kept = sorted({token, *mu.topk(k).indices.tolist()})
                cut = [torch.cat([p[kept], 1 - p[kept].sum(0, keepdim=True)]) for p in (mu, pi)]
                tv, kl = 0.5 * (cut[0] - cut[1]).abs().sum(), (cut[0] * (cut[0] / cut[1]).log()).sum()
                ratio, a = (pi[token] / mu[token]).item(), row["advantage"]
                far = (tv if region == "dppo_topk_tv" else kl).item() > radius
                outside.append(far)
                if not (far and (ratio > 1 if a > 0 else ratio < 1)):
                    value = value + min(ratio, CAP) / ratio * a * (logps[place, token] - mu[token].log()).exp()
            loss = loss - value * weight.double() / len(row["completion"]) / len(rows) / len(step.batches)
    assert 0.1 < sum(outside) / len(outside) < 0.95
    assert logged(trainer, "trust_region/violation_rate")[0] == pytest.approx(sum(outside) / len(outside))
    queries = distinct_queries([rows_of(batch) for batch in step.batches])
    start = double_copy(model)
    with torch.no_grad():
        reference = {q: token_logps(start, list(q), temperature) for q in queries}
    (loss + penalty_of(policy, queries, reference, ALPHA, temperature=temperature)).backward()
    assert_grads_close(step.grads, policy, rel=1e-3)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            lambda out: {k: v for k, v in out.items() if k != "logprob_token_ids"},
            "needs `logprob_token_ids` from rollout",
        ),
        (
            lambda out: (
                out
                | {"logprob_token_ids": [[[0, 1]] * len(c) for c in out["completion_ids"]]}
                | {"logprobs": [[[-1.0, -2.0]] * len(c) for c in out["completion_ids"]]}
            ),
            "does not list the sampled id",
        ),
    ],
)
def test_rollouts_without_the_likeliest_tokens_are_refused(tmp_path, wrong, message):
    """A rollout that leaves them out fails with what it must return."""
    trainer = make_trainer(
        tmp_path, rollout=listing_rollout(2, wrong=wrong), **settings("dppo_topk_tv", trust_region_topk=2)
    )
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_topk_without_a_source_is_refused(tmp_path):
    """Transformers' generation lists no tokens."""
    with pytest.raises(ValueError, match="transformers' generation does not give.*logprob_token_ids.*'dppo_tv'"):
        make_trainer(tmp_path, **settings("dppo_topk_tv"))


class Engine:
    """In place of TRL's vLLM engine: samples from the trainer's own model, temperature and filters as the engine would.

    `served_at`: the temperature its log-probs are at, if not the sampling's.
    """

    def __init__(self, served_at=None, **settings):
        self.settings, self.logprobs, self.served_at = settings, settings["logprobs"], served_at
        self.trained = settings["model"]
        self.model = copy.deepcopy(self.trained).double()
        self.calls = 0

    def sync_weights(self):
        self.model.load_state_dict(self.trained.state_dict())

    def generate(self, prompts, images, num_generations, profiler=None):
        self.calls += 1
        temperature, completions, logprobs, ids = self.settings["temperature"], [], [], []
        generator = torch.Generator().manual_seed(self.calls)
        for prompt in prompts:
            row, row_logprobs, row_ids = list(prompt), [], []
            for _ in range(self.settings["max_completion_length"]):
                logps = next_token_logps(self.model, row, temperature)[-1]
                token = torch.multinomial(logps.exp(), 1, generator=generator).item()
                said = next_token_logps(self.model, row, self.served_at or temperature)[-1]
                top = said.topk(self.logprobs).indices.tolist() if self.logprobs else []
                listed = top if token in top else [*top, token]
                row.append(token)
                row_ids.append(listed)
                row_logprobs.append(said[listed].tolist())
            completions.append(row[len(prompt) :])
            logprobs.append(row_logprobs)
            ids.append(row_ids)
        return prompts, completions, logprobs, ids


@pytest.fixture
def engine(monkeypatch):
    """TRL's vLLM engine replaced; its keyword arguments can be changed through the dict."""
    more = {}
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", lambda **kwargs: Engine(**more, **kwargs))
    return more


VLLM = {"use_vllm": True, "vllm_mode": "colocate", "num_iterations": 1}


@pytest.mark.parametrize("region", ["drpo", "dppo_tv", "dppo_topk_tv", "spo"])
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_the_mismatch_is_applied_once(tmp_path, engine, region, mode):
    """TRL's importance-sampling correction multiplies the loss by π_old/μ; with a region r = π/μ holds that already.

    The same step without the correction, where nothing could be applied twice, has the same gradient.
    """
    engine["served_at"] = 1.4
    grads = []
    for correction in (True, False):
        trainer = make_trainer(
            tmp_path / str(correction),
            dataset=prompts_dataset(UNEQUAL),
            **settings(region, max_steps=1, trust_region_topk=4, trust_region_delta=0.1, **VLLM),
            vllm_importance_sampling_correction=correction,
            vllm_importance_sampling_mode=mode,
            trust_region_check_rollout=False,
        )
        recorder = Recorder().attach(trainer)
        trainer.train()
        assert logged(trainer, "trust_region/shift_mean")[0] > 0.001
        grads.append(recorder.done[0].grads)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-5, atol=1e-9)


def test_topk_takes_the_sampled_log_probs_from_the_engine(tmp_path, engine):
    """TRL reads the first entry as the sampled token's, where an engine asked for more puts the likeliest."""
    trainer = make_trainer(tmp_path, **settings("dppo_topk_kl", trust_region_topk=4, max_steps=1, **VLLM))
    recorder = Recorder().attach(trainer)
    trainer.train()
    assert trainer.vllm_generation.logprobs == 4
    # Before any update the engine is the policy: every |π - μ| is rounding
    assert logged(trainer, "trust_region/shift_max")[0] < 1e-5
    batch = recorder.done[0].batches[0]
    assert batch["topk_ids"].shape == (*batch["completion_ids"].shape, 4)
    assert (batch["topk_logps"].diff(dim=-1) <= 0).all()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"top_p": 0.9}, "renormalises over the tokens that top_p=0.9 leave.*Set top_p=1.0"),
        ({"top_k": 20, "min_p": 0.1}, "top_k=20, min_p=0.1 leave.*Set top_k=0, min_p=None"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"generation_kwargs": {"top_p": 0.8}}, "top_p=0.8 leave"),
        ({"generation_kwargs": {"presence_penalty": 0.5}}, "presence_penalty=0.5 leave.*Set presence_penalty=0.0"),
        ({"generation_kwargs": {"min_tokens": 3, "logit_bias": {5: 9.0}}}, "min_tokens=3, logit_bias="),
        ({"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex=.*=None"),
        ({"generation_kwargs": {"temperature": 0.5}}, "generation_kwargs sets temperature=0.5"),
        ({"trust_region": "dppo_topk_tv", "trust_region_topk": 50}, "a colocated vLLM gives at most 20"),
    ],
)
def test_filtered_log_probs_are_refused(tmp_path, engine, fields, message):
    """vLLM's processed log-probs are over what the filters leave; the policy's never are."""
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **settings("drpo", **VLLM) | fields)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits"])
def test_servers_say_what_their_log_probs_are(tmp_path, engine, monkeypatch, mode):
    """Raw log-probs are at temperature 1 and before filters: right for the one, wrong for another temperature."""

    class Client:
        def get_server_info(self):
            return {"model_config": {"logprobs_mode": mode}}

    monkeypatch.setattr(Engine, "vllm_client", Client(), raising=False)
    server = {"vllm_mode": "server", "vllm_importance_sampling_correction": False}
    filtered, warm = {"top_p": 0.9}, {"temperature": 0.8}
    refused = {"raw_logprobs": warm, "processed_logprobs": filtered, "raw_logits": {}}[mode]
    with pytest.raises(ValueError, match=f"{mode}|renormalises"):
        make_trainer(tmp_path, **settings("drpo", **VLLM | server) | refused)
    if mode == "raw_logprobs":
        make_trainer(tmp_path, **settings("drpo", **VLLM | server) | filtered)


@pytest.mark.parametrize("served_at", [0.7, 1.3])
def test_log_probs_at_another_temperature_are_refused(tmp_path, engine, served_at):
    """Settings look right but the engine's log-probs are not: seen at the first step, before any update."""
    engine["served_at"] = served_at
    fields = {"per_device_train_batch_size": 16, "max_completion_length": 12, "query_kl_coef": 0.0}
    trainer = make_trainer(tmp_path, dataset=prompts_dataset(), **settings("drpo", **VLLM) | fields)
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ValueError, match="before any update.*trainer's temperature.*trust_region_check_rollout=False"):
        trainer.train()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_engines_own_log_probs_pass(tmp_path, engine):
    """The same without the fault; rounding that goes both ways is no reason to stop."""
    inner = Engine.generate

    def noisy(self, *args, **kwargs):
        prompts, completions, logprobs, ids = inner(self, *args, **kwargs)
        generator = torch.Generator().manual_seed(0)
        bent = [[[x + 0.3 * torch.randn(1, generator=generator).item() for x in e] for e in row] for row in logprobs]
        return prompts, completions, bent, ids

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "generate", noisy)
        fields = {"per_device_train_batch_size": 16, "max_completion_length": 12, "query_kl_coef": 0.0}
        trainer = make_trainer(tmp_path, **settings("drpo", **VLLM) | fields)
        trainer.train()
    assert logged(trainer, "trust_region/shift_mean")[0] > 0.002


# ---------------------------------------------------------------------------------------- presets, radius, TRL's own masks
def test_drpo_preset(tmp_path):
    """The published recipe, and what the user sets goes before it."""
    config = make_config(tmp_path, preset="drpo", loss_type=None)
    found = (config.trust_region, config.trust_region_delta, config.loss_type, config.scale_rewards)
    assert found == ("drpo", 12.5, "dr_grpo", "none")
    assert (config.query_kl_coef, config.query_weight) == (0.0, "uniform")
    own = make_config(tmp_path, preset="drpo", loss_type="bnpo", query_kl_coef=0.02, trust_region_delta=0.2)
    assert (own.loss_type, own.query_kl_coef, own.trust_region_delta, own.trust_region) == ("bnpo", 0.02, 0.2, "drpo")
    plain = make_config(tmp_path, loss_type=None)
    assert (plain.loss_type, plain.scale_rewards, plain.trust_region) == ("dapo", "group", "ratio_clip")


def test_adaptive_radius_follows_the_moves(tmp_path):
    """δ moves with the p99 of |π - μ| on the steps that moved, is what the next step uses, and is logged."""
    trainer, _ = run(
        tmp_path,
        tiny_model("qwen2"),
        "drpo",
        max_steps=4,
        trust_region_delta_target=0.5,
        trust_region_delta_rate=1.0,
    )
    delta, p99 = logged(trainer, "trust_region/delta"), logged(trainer, "trust_region/shift_p99")
    # Steps 1 and 3 follow a generation: nothing moved
    assert delta[0] == DELTA and delta[2] == delta[1]
    assert delta[1] == pytest.approx(p99[1] / 0.5) and delta[3] == pytest.approx(p99[3] / 0.5)
    assert trainer.region_params.delta == delta[3]


def test_adaptive_radius_resumes(tmp_path):
    """A resumed run goes on with the checkpoint's δ, not with the configured one."""
    fields = settings("drpo", max_steps=4, trust_region_delta_target=0.5, save_strategy="steps", save_steps=2)
    build = {"dataset": prompts_dataset(UNEQUAL), "rollout": fixed_rollouts(), **fields}
    build["trust_region_check_rollout"] = False
    whole = make_trainer(tmp_path, **build)
    whole.train()
    resumed = make_trainer(tmp_path, **build)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert logged(resumed, "trust_region/delta")[-2:] == logged(whole, "trust_region/delta")[-2:]
    assert logged(whole, "trust_region/delta")[1] != DELTA
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], value, rtol=1e-6, atol=1e-7)


def test_off_policy_sequence_mask_reads_the_plain_advantage(tmp_path, raw_advantages):
    """TRL's mask drops sequences with A < 0 that drifted; a corrective token, w·A > 0, goes with its sequence."""
    model, threshold = tiny_model("qwen2"), 1e-4
    trainer, recorder = run(tmp_path, model, "drpo", off_policy_mask_threshold=threshold, learning_rate=0.5)
    step = recorder.done[1]
    policy = double_copy(model, step.weights)
    dropped = corrective = 0
    loss = 0.0
    for batch in step.batches:
        rows = rows_of(batch)
        for row, weight in zip(rows, batch["query_weight"]):
            logps = token_logps(policy, row["prompt"] + row["completion"])[len(row["prompt"]) - 1 :]
            far = (row["old"] - logps.detach()).mean().item() > threshold
            a = torch.tensor(row["advantage"], dtype=torch.float64)
            if far and a < 0:
                dropped += 1
                corrective += int((logps.exp() - row["old"].exp() < -DELTA).any())
                continue
            value = OBJECTIVES["drpo"]((logps - row["old"]).exp(), row["old"].exp(), a).sum()
            loss = loss - value * weight.double() / len(row["completion"]) / len(rows) / len(step.batches)
    assert dropped and corrective
    queries = distinct_queries([rows_of(batch) for batch in step.batches])
    start = double_copy(model)
    with torch.no_grad():
        reference = {q: token_logps(start, list(q)) for q in queries}
    policy.zero_grad()
    (loss + penalty_of(policy, queries, reference, ALPHA)).backward()
    assert_grads_close(step.grads, policy, rel=3e-4)


@pytest.mark.parametrize(
    "setup", [{"bf16": True}, {"bf16": True, "cast_lm_head_to_fp32": True}, {"dtype": torch.bfloat16}]
)
def test_topk_log_probs_have_the_heads_precision(tmp_path, setup):
    """π on a listed id is what TRL's own head says of it as a label: under autocast, with the head cast out of it, in bf16."""
    setup = dict(setup)
    model = tiny_model("llama", dtype=setup.pop("dtype", torch.float32), initializer_range=0.8)
    trainer = make_trainer(
        tmp_path,
        model=model,
        rollout=listing_rollout(4),
        **settings("dppo_topk_tv", num_iterations=1, max_steps=1, trust_region_topk=4, query_kl_coef=0.0)
        | {"trust_region_check_rollout": False, "learning_rate": 0.0},
        **setup,
    )
    seen = []
    inner = trainer._weight_advantages
    trainer._weight_advantages = lambda inputs, logps, topk: (seen.append((inputs, topk)), inner(inputs, logps, topk))
    trainer.train()
    [(inputs, found)] = seen
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].shape[1]
    for column in range(4):
        # The same hidden states, another label: only the last position's input is not shifted by it
        labels = torch.cat([ids[:, :-width], inputs["topk_ids"][..., column].clamp(min=0)], dim=1)
        labels = labels.masked_fill(mask == 0, -100)
        with torch.no_grad(), trainer.accelerator.autocast():
            direct = trainer.model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
        real = (inputs["completion_mask"] * (inputs["topk_ids"][..., column] >= 0)).bool()
        gap = (direct[:, -width:].exp() - found[..., column].exp())[real].abs().max()
        assert gap < 2e-3, gap


def test_the_rollout_check_waits_for_tokens(tmp_path):
    """Steps with few tokens, here none of them counting in the first, put the judgement off and do not replace it."""
    calls = []

    def rollout(prompts, trainer):
        output = fixed_rollouts()(prompts, trainer)
        calls.append(1)
        output["logprobs"] = [[-0.05] * len(completion) for completion in output["completion_ids"]]
        if len(calls) == 1:
            output["env_mask"] = [[0] * len(completion) for completion in output["completion_ids"]]
        else:
            output["env_mask"] = [[1] * len(completion) for completion in output["completion_ids"]]
        return output

    fields = settings("drpo", num_iterations=1, max_steps=20, learning_rate=1e-4)
    trainer = make_trainer(tmp_path, rollout=rollout, **fields)
    with pytest.raises(ValueError, match="sharper throughout"):
        trainer.train()
    assert 2 < trainer.state.global_step < 10


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_tokens_the_engine_cannot_score(tmp_path, value):
    """They count as not moved and leave metrics and weights finite."""

    def rollout(prompts, trainer):
        output = fixed_rollouts()(prompts, trainer)
        output["logprobs"] = [[value] + [-5.0] * (len(c) - 1) for c in output["completion_ids"]]
        return output

    fields = settings("drpo", num_iterations=1, max_steps=1, trust_region_check_rollout=False)
    trainer = make_trainer(tmp_path, rollout=rollout, **fields)
    trainer.train()
    assert logged(trainer, "trust_region/ratio_max")[0] < 10
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_rollout_without_log_probs_is_refused(tmp_path):
    """With one update per generation nothing says how the policy has moved."""

    def rollout(prompts, trainer):
        return fixed_rollouts()(prompts, trainer) | {"logprobs": None}

    trainer = make_trainer(tmp_path, rollout=rollout, **settings("drpo", num_iterations=1))
    with pytest.raises(ValueError, match="rollout_func returned logprobs=None"):
        trainer.train()
    make_trainer(tmp_path, rollout=rollout, **settings("drpo", num_iterations=2, max_steps=2)).train()


def test_a_step_that_was_broken_off_leaves_nothing_behind(tmp_path):
    """Interrupted after its first micro-batch of two, and trained again: each later step is made of its own two."""
    fields = settings("drpo", gradient_accumulation_steps=2, per_device_train_batch_size=4, max_steps=4)
    trainer = make_trainer(tmp_path, model=tiny_model("qwen2"), dataset=prompts_dataset(UNEQUAL), **fields)
    compute_loss, calls = trainer.compute_loss, []

    def broken(*args, **kwargs):
        calls.append(len(calls))
        loss = compute_loss(*args, **kwargs)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return loss

    trainer.compute_loss = broken
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    metrics, counts = trainer._region_metrics["train"], []
    end_step = metrics.end_step
    metrics.end_step = lambda accelerator: (counts.append(metrics.micro_batches), end_step(accelerator))[1]
    trainer.train()
    assert counts == [2] * 4 and metrics.micro_batches == 0


def test_a_prediction_is_no_part_of_the_next_evaluation(tmp_path):
    """Its moves are logged nowhere, and forgotten."""
    held = prompts_dataset(UNEQUAL[:4])
    fields = settings("drpo", max_steps=2, per_device_eval_batch_size=4)
    trainer = make_trainer(
        tmp_path,
        model=tiny_model("qwen2"),
        dataset=prompts_dataset(UNEQUAL),
        trainer_kwargs={"eval_dataset": held},
        **fields,
    )
    trainer.train()
    trainer.predict(held)
    assert trainer._region_metrics["eval"].summarize() == {}
