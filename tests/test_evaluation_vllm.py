"""The vLLM backend against a stand-in for vLLM that records what it is asked; vLLM itself is not among the test packages."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from evaluation_helpers import read_metrics, samples
from helpers import byte_tokenizer, lora_model, tiny_model

from erpo_trl import evaluate
from erpo_trl.evaluation import vllm_backend
from erpo_trl.evaluation.model_source import ModelSource
from erpo_trl.evaluation.sampling import PASS_AT_1_DRAW, sample_seed
from erpo_trl.evaluation.vllm_backend import VLLMBackend, _rank_slot


class Engine:
    """Answers with the box of the request's seed, so that copies would show; ends every second completion at the limit."""

    made = []
    on_cpu = False

    def __init__(self, **options):
        self.options, self.calls = options, []
        Engine.made.append(self)

    def generate(self, prompts, sampling_params, lora_request, use_tqdm):
        self.calls.append((prompts, sampling_params, lora_request))
        outputs = []
        for params in sampling_params:
            ids = byte_tokenizer()(f"\\boxed{{{params['seed'] % 10**9}}}")["input_ids"]
            reason = "stop" if params["seed"] % 2 else "length"
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(ids), finish_reason=reason)]))
        return outputs


@pytest.fixture
def vllm(monkeypatch):
    Engine.made.clear()
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request", "vllm.platforms")}
    modules["vllm"].LLM = Engine
    modules["vllm"].SamplingParams = lambda **options: options
    modules["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: Engine.on_cpu)
    modules["vllm.lora.request"].LoRARequest = lambda *fields: fields
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("erpo_trl.evaluation.run.plot_sweeps", lambda *args: False)


def save(model, folder):
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def write_problems(path, count=3):
    path.write_text("".join(f'{{"problem": "{"x" * i}", "answer": "{i}"}}\n' for i in range(1, count + 1)))
    return [str(path)]


def test_every_request_has_its_own_seed_and_plain_sampling(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_backend, "REQUESTS_PER_PART", 4)
    model, file = save(tiny_model("qwen2"), tmp_path / "model"), write_problems(tmp_path / "own.jsonl")
    metrics = evaluate(
        model=model, output=str(tmp_path / "out"), file=file, samples=2, temperatures=[0, 1.5], max_new_tokens=30,
        backend="vllm", tensor_parallel_size=2, dtype="float32", gpu_memory_utilization=0.5, seed=7, bootstrap=10,
    )  # fmt: skip
    [engine] = Engine.made
    prompts = [prompt["prompt_token_ids"] for call in engine.calls for prompt in call[0]]
    # The longest prompt is a turn marker, three letters, an end of turn and the generation prompt
    assert engine.options == {
        "model": model, "tokenizer": model, "revision": None, "tensor_parallel_size": 2, "dtype": "float32",
        "max_model_len": 6 + 30, "gpu_memory_utilization": 0.5, "seed": 7,
    }  # fmt: skip
    template = byte_tokenizer().apply_chat_template(
        [{"role": "user", "content": "xxx"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert prompts[2] == template and len(prompts) == 3 + 9
    asked = [params for call in engine.calls for params in call[1]]
    assert [len(call[1]) for call in engine.calls] == [3, 4, 4, 1]
    draws = [(row, 0, 0.0) for row in range(3)]
    draws += [(row, sample, 1.5) for row in range(3) for sample in (0, 1, PASS_AT_1_DRAW)]
    assert [params["seed"] for params in asked] == [sample_seed(7, "own", *draw) for draw in draws]
    assert [params["temperature"] for params in asked] == [draw[2] for draw in draws]
    plain = {"n": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 30}
    assert all(params.items() >= plain.items() for params in asked)
    assert all(call[2] is None for call in engine.calls)
    rows = samples(tmp_path / "out")
    assert all(row["answer"] == str(row["seed"] % 10**9) for row in rows)
    assert all((row["finish"] == "stop") == bool(row["seed"] % 2) for row in rows)
    assert metrics["settings"]["tensor_parallel_size"] == 2
    assert read_metrics(tmp_path / "out") == metrics


def test_tensor_parallel_size_is_part_of_what_a_sample_depends_on(vllm, tmp_path):
    """The paper's TP1 and TP2 are two results; a folder of one is not taken for the other."""
    model, file = save(tiny_model("qwen2"), tmp_path / "model"), write_problems(tmp_path / "own.jsonl")
    options = {"model": model, "output": str(tmp_path / "out"), "file": file, "samples": 1, "temperatures": [1.0]}
    for size in (1, 1, 2):
        evaluate(**options, max_new_tokens=20, backend="vllm", tensor_parallel_size=size, bootstrap=10)
    assert [engine.options["tensor_parallel_size"] for engine in Engine.made] == [1, 2]


def test_adapter_is_a_lora_request(vllm, tmp_path):
    base, adapter = save(tiny_model("llama"), tmp_path / "base"), tmp_path / "adapter"
    model = lora_model(pretrained=True)
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(adapter)
    evaluate(
        model=str(adapter), output=str(tmp_path / "out"), file=write_problems(tmp_path / "own.jsonl"), samples=1,
        temperatures=[1.0], max_new_tokens=20, backend="vllm", bootstrap=10,
    )  # fmt: skip
    [engine] = Engine.made
    assert engine.options["model"] == engine.options["tokenizer"] == base
    assert engine.options["enable_lora"] is True and engine.options["max_lora_rank"] == 8  # of rank 4
    assert engine.calls[0][2] == ("adapter", 1, str(adapter))


def test_adapter_of_the_hub_is_fetched_with_its_weights(vllm, tmp_path, monkeypatch):
    adapter = tmp_path / "fetched"
    lora_model(pretrained=True).save_pretrained(adapter)
    asked = []
    monkeypatch.setattr(
        "erpo_trl.evaluation.vllm_backend.snapshot_download",
        lambda name, revision, allow_patterns: asked.append((name, revision, allow_patterns)) or str(adapter),
    )
    source = ModelSource("base", None, "someone/adapter", "v1", "base", "digest")
    backend = VLLMBackend(source, 1, "auto", 64, 0.9, 0)
    assert asked == [("someone/adapter", "v1", "adapter_*")]
    assert backend.lora == ("adapter", 1, str(adapter)) and (adapter / "adapter_model.safetensors").is_file()


def test_several_processes_are_refused(vllm, tmp_path, monkeypatch):
    state = SimpleNamespace(num_processes=2, process_index=0, is_main_process=True, device="cpu")
    monkeypatch.setattr("erpo_trl.evaluation.run.PartialState", lambda **options: state)
    with pytest.raises(ValueError, match="backend 'vllm' runs in one process.*tensor_parallel_size; found 2"):
        evaluate(model="demo", output=str(tmp_path), benchmarks=["arithmetic"], backend="vllm")


def test_prompts_are_not_cut_on_a_cpu(vllm, tmp_path, monkeypatch):
    """vLLM's engine dies of a seeded request whose prompt it cuts there."""
    monkeypatch.setattr(Engine, "on_cpu", True)
    model, file = save(tiny_model("qwen2"), tmp_path / "model"), write_problems(tmp_path / "own.jsonl")
    evaluate(
        model=model, output=str(tmp_path / "out"), file=file, samples=1, temperatures=[1.0], max_new_tokens=20,
        backend="vllm", bootstrap=10,
    )  # fmt: skip
    assert Engine.made[0].options["enable_chunked_prefill"] is False


def test_ranks_that_vllm_has_slots_for():
    assert [_rank_slot(rank) for rank in (1, 4, 8, 9, 64, 300)] == [1, 8, 8, 16, 64, 320]
    with pytest.raises(ValueError, match="adapters up to rank 512, found 1024: merge it"):
        _rank_slot(1024)
