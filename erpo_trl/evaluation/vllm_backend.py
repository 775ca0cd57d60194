"""The backend on vLLM: continuous batching, tensor parallel, a seed per request.

Only vLLM's public classes are used: `LLM`, `SamplingParams`, `LoRARequest`. Prompts go in as token ids, so both backends see
the same ones.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download

from .backends import Draw, Request
from .model_source import ModelSource

# Requests between two points at which finished samples are saved. vLLM batches within such a part; the more it has at hand,
# the less its slowest request is waited for.
REQUESTS_PER_PART = 2048


class VLLMBackend:
    """Generation by one vLLM engine of this process.

    Args: source: the model; tensor_parallel_size: GPUs that share it; dtype: of the weights; max_model_len: longest prompt and
    completion together; gpu_memory_utilization: share of each GPU's memory that vLLM takes; seed: of the engine (every request
    has its own).
    """

    def __init__(
        self,
        source: ModelSource,
        tensor_parallel_size: int,
        dtype: str,
        max_model_len: int,
        gpu_memory_utilization: float,
        seed: int,
    ):
        try:
            from vllm import LLM, SamplingParams
            from vllm.lora.request import LoRARequest
            from vllm.platforms import current_platform
        except ImportError as error:
            raise ValueError(
                f"backend 'vllm' needs vLLM ({error}): pip install 'erpo-trl[vllm]', or use backend 'transformers'"
            ) from error
        options = {}
        if current_platform.is_cpu():
            # After a part of a prompt vLLM (0.32.0) winds a request's generator back, and torch's CPU generators cannot be
            # ("CPU Generator does not use offset"; described in RBLN-SW/vllm-rbln#1025). So prompts are not cut there.
            options["enable_chunked_prefill"] = False
        self.lora = None
        if source.adapter is not None:
            # vLLM wants a folder with the weights in it
            folder = Path(source.adapter)
            if not folder.is_dir():
                folder = Path(
                    snapshot_download(source.adapter, revision=source.adapter_revision, allow_patterns="adapter_*")
                )
            adapter = json.loads((folder / "adapter_config.json").read_text())
            rank = max([adapter["r"], *(adapter.get("rank_pattern") or {}).values()])
            options |= {"enable_lora": True, "max_lora_rank": _rank_slot(rank)}
            self.lora = LoRARequest("adapter", 1, str(folder))
        self.sampling_params = SamplingParams
        self.llm = LLM(
            model=source.name,
            tokenizer=source.tokenizer,
            revision=source.revision,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            max_model_len=max_model_len,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
            **options,
        )

    def plan(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Requests in their order, in parts."""
        return [list(requests[i : i + REQUESTS_PER_PART]) for i in range(0, len(requests), REQUESTS_PER_PART)]

    def generate(self, batch: Sequence[Request]) -> list[Draw]:
        """Draws of requests, in their order. vLLM adds the end-of-sequence ids of the model's generation config itself."""
        params = [
            # top_p and the like are given, since vLLM would otherwise be free to take the model's recommendations
            self.sampling_params(
                n=1,
                temperature=r.temperature,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                repetition_penalty=1.0,
                max_tokens=r.max_new_tokens,
                seed=r.seed,
                detokenize=False,
            )
            for r in batch
        ]
        prompts = [{"prompt_token_ids": list(r.prompt_ids)} for r in batch]
        outputs = self.llm.generate(prompts, sampling_params=params, lora_request=self.lora, use_tqdm=False)
        return [Draw(list(o.outputs[0].token_ids), o.outputs[0].finish_reason == "stop") for o in outputs]


def _rank_slot(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM that holds an adapter of this rank."""
    slots = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    fitting = [slot for slot in slots if slot >= rank]
    if not fitting:
        raise ValueError(
            f"vLLM serves adapters up to rank {slots[-1]}, found {rank}: merge it, or use backend 'transformers'"
        )
    return fitting[0]
