"""ERPOTrainer with a real vLLM engine on a CPU: a server in a process of its own, and colocated. `make check-vllm` runs it.

The demo model in float32 on both sides, so that the two engines' log-probs agree to rounding: what differs is a bug.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import cpu_engine
import pytest
import requests
import torch
from trl.generation.vllm_client import VLLMClient

from erpo_trl import ERPOConfig, ERPOTrainer, accuracy_reward
from erpo_trl.data import resolve_dataset
from erpo_trl.demo import MODEL_DIR
from erpo_trl.train import main as train

RECIPES = Path(__file__).parents[2] / "recipes"
START_LIMIT = 400  # seconds, for the server to come up on a busy machine
# In float32; two engines sum in different orders
AGREE = 2e-5
# `LLM` takes these from the environment as the server does
os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Address of a vLLM server with the demo model, up and healthy."""
    port = free_port()
    folder = tmp_path_factory.mktemp("server")
    log = folder / "log"
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": f"{here}:{root}",
        "VLLM_SERVER_DEV_MODE": "1",  # the endpoints that weights are sent to
        "ERPO_TEST_ENGINE_WORKER": "1",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL_DIR)]
    command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "128"]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--enforce-eager"]
    command += ["--worker-extension-cls", "cpu_engine.LoadWeights"]
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_LIMIT
        while not _healthy(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"The vLLM server did not come up:\n{log.read_text()[-5000:]}")
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _healthy(address: str) -> bool:
    try:
        return requests.get(f"{address}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


@pytest.fixture
def on_server(server, monkeypatch):
    """Fields of a config that generates on the server."""
    for name in ("init_communicator", "update_named_params"):
        monkeypatch.setattr(VLLMClient, name, getattr(VLLMClient, name))  # put back after the test
    cpu_engine.share_weights_by_file(VLLMClient)
    return {"vllm_mode": "server", "vllm_server_base_url": server}


def make_trainer(folder, where: dict, **fields) -> ERPOTrainer:
    """A trainer of the demo model that generates with vLLM and keeps every generated batch in `.batches`."""
    defaults = {
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "max_steps": 3,
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "max_completion_length": 16,
        "max_grad_norm": 1e9,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    config = ERPOConfig(
        str(folder), use_vllm=True, reference_cache_dir=str(folder / "reference"), **defaults | where | fields
    )
    trainer = ERPOTrainer(
        str(MODEL_DIR),
        accuracy_reward,
        config,
        train_dataset=resolve_dataset("arithmetic", split="train").select(range(64)),
    )
    trainer.batches = []
    generate = trainer._generate_and_score_completions

    def keep(inputs):
        trainer.batches.append(generate(inputs))
        return trainer.batches[-1]

    trainer._generate_and_score_completions = keep
    return trainer


def logs(trainer: ERPOTrainer) -> list[dict]:
    return [entry for entry in trainer.state.log_history if "query/kl" in entry]


def gap(batch: dict, logps: torch.Tensor) -> float:
    """Largest difference in nats between the engine's log-probs and `logps`, over the completions' tokens."""
    mask = batch["completion_mask"].bool()
    assert mask.sum() > 32
    return (batch["sampling_per_token_logps"] - logps)[mask].abs().max().item()


def initial_logps(batch: dict) -> torch.Tensor:
    """Log-probs of the batch's completions under the model before training."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return logps[:, -batch["completion_ids"].shape[1] :]


def check_engine_follows_policy(trainer: ERPOTrainer) -> None:
    """Three updates: at each generation the engine samples from the weights in training, and not from the first ones."""
    trainer.train()
    assert len(trainer.batches) == 3
    for batch in trainer.batches:
        assert gap(batch, batch["old_per_token_logps"]) < AGREE
        # the correction is on, and has nothing to correct
        torch.testing.assert_close(
            batch["importance_sampling_ratio"], torch.ones_like(batch["importance_sampling_ratio"]), rtol=0, atol=1e-3
        )
    first, *later = (gap(batch, initial_logps(batch)) for batch in trainer.batches)
    assert first < AGREE
    assert min(later) > 0.05
    steps = logs(trainer)
    assert steps[0]["query/kl"] < 1e-9
    assert steps[-1]["query/kl"] > 1e-5
    assert all(step["query/alpha"] == 0.01 for step in steps)


def test_server_follows_the_policy(tmp_path, on_server):
    trainer = make_trainer(tmp_path, on_server)
    check_engine_follows_policy(trainer)
    # After the last update nobody has sent the weights yet: the server still samples from those before it
    prompts = [[token for token, kept in zip(ids, mask) if kept] for ids, mask in _prompts(trainer)]
    stale = _greedy(trainer, prompts)
    trainer.vllm_generation.sync_weights()
    assert _greedy(trainer, prompts) != stale


def _prompts(trainer: ERPOTrainer):
    batch = trainer.batches[-1]
    return zip(batch["prompt_ids"].tolist(), batch["prompt_mask"].tolist())


def _greedy(trainer: ERPOTrainer, prompts: list[list[int]]) -> list:
    """Likeliest completions with their log-probs, as the server has them."""
    output = trainer.vllm_generation.vllm_client.generate(prompts, temperature=0.0, max_tokens=8)
    return list(zip(output["completion_ids"], output["logprobs"]))


def test_server_with_drpo(tmp_path, on_server):
    """One update per generation: the rollout's log-probs are the behaviour policy, where without vLLM DRPO is refused."""
    trainer = make_trainer(tmp_path, on_server, trust_region="drpo", trust_region_delta=0.2)
    trainer.train()
    steps = logs(trainer)
    assert steps[0]["query/kl"] < 1e-9 < steps[-1]["query/kl"]
    for step in steps:
        assert step["trust_region/shift_max"] < AGREE
        assert step["trust_region/weight_min"] == pytest.approx(1, abs=1e-3)
        assert step["trust_region/violation_rate"] == 0


@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_mismatch_with_the_rollout_counts_once(tmp_path, on_server, shift):
    """Rollout log-probs that are too low by `shift` give r = e^shift on every token. Under a trust region without a reach
    (δ so large that DRPO's weight is 1) the gradient is r·A·∇log π: e^shift times the one without a shift, not e^(2·shift),
    although TRL's own correction by that ratio is on.
    """
    fields = {
        "max_steps": 1,
        "query_kl_coef": 0.0,
        "trust_region": "drpo",
        "trust_region_delta": 1e9,
        "trust_region_check_rollout": False,  # which refuses such a shift
        "vllm_importance_sampling_mode": "token_truncate",
    }
    trainer = make_trainer(tmp_path / "engine", on_server, **fields)
    generate = trainer.vllm_generation.generate
    rollout = []

    def record(*args, **kwargs):
        rollout.append(generate(*args, **kwargs))
        return rollout[0]

    trainer.vllm_generation.generate = record
    trainer.train()

    replayed = make_trainer(tmp_path / "replayed", on_server, **fields)
    prompts, completions, logprobs, tokens = rollout[0]
    shifted = [[[value - shift for value in token] for token in sequence] for sequence in logprobs]
    replayed.vllm_generation.generate = lambda *args, **kwargs: (prompts, completions, shifted, tokens)
    replayed.train()

    ratio = replayed.batches[0]["importance_sampling_ratio"][replayed.batches[0]["completion_mask"].bool()]
    torch.testing.assert_close(ratio, torch.full_like(ratio, torch.tensor(shift).exp().item()), rtol=1e-3, atol=0)
    norms = [logs(run)[0]["grad_norm"] for run in (trainer, replayed)]
    assert norms[0] > 1e-3
    assert norms[1] / norms[0] == pytest.approx(torch.tensor(shift).exp().item(), rel=1e-3)


SMALL = [
    *("--model_name_or_path", "demo", "--dataset", "arithmetic", "--max_rows", "64", "--max_steps", "4"),
    *("--bf16", "false", "--dtype", "float32", "--use_cpu", "true", "--max_prompt_length", "64"),
    *("--max_completion_length", "16", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"),
    *("--steps_per_generation", "8", "--save_strategy", "no"),
]


def small_recipe(name: str, folder: Path) -> list[str]:
    options = ["--output_dir", str(folder / "out"), "--reference_cache_dir", str(folder / "reference")]
    return ["--config", str(RECIPES / "qwen2.5-0.5b" / f"{name}.yaml"), *SMALL, *options]


def test_server_recipe(tmp_path, on_server):
    """The shipped recipe, with the demo model in place of its own."""
    train([*small_recipe("vllm_server", tmp_path), "--vllm_server_base_url", on_server["vllm_server_base_url"]])
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0


def test_colocate_recipe(tmp_path):
    """The same, in a process of its own, whose engine is in bfloat16 as vLLM chooses."""
    script = (
        "import sys, cpu_engine; cpu_engine.keep_linear_weights(); from erpo_trl.train import main; main(sys.argv[1:])"
    )
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    options = [*small_recipe("vllm_colocate", tmp_path), "--vllm_max_model_length", "128"]
    done = subprocess.run(
        [sys.executable, "-c", script, *options],
        env=os.environ | {"PYTHONPATH": f"{here}:{root}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=START_LIMIT,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0


def test_colocated_engine_follows_the_policy(tmp_path, monkeypatch):
    """Last, since a process holds one engine in its life, and its end takes the process group along."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    cpu_engine.keep_linear_weights()
    cpu_engine.engine_in_float32()
    trainer = make_trainer(tmp_path, {"vllm_mode": "colocate", "vllm_max_model_length": 128})
    try:
        check_engine_follows_policy(trainer)
    finally:
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
