"""What lets vLLM on a CPU take new weights, for the tests alone: on a GPU, TRL and vLLM do it themselves.

Imported by the trainer's process (`share_weights_by_file`, `engine_in_float32`, `keep_linear_weights`) and, as `--worker-extension-cls
cpu_engine.LoadWeights`, by the server's worker.
"""

import functools
import os
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def keep_linear_weights() -> None:
    """Keep linear layers as they were loaded. vLLM packs them for its CPU kernels, after which no weight can be loaded."""
    from vllm.model_executor.layers import utils

    def plain_linear(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain_linear


def engine_in_float32() -> None:
    """Let the colocated engine keep float32, which vLLM otherwise turns into bfloat16, and skip its compilation."""
    from trl.generation import vllm_generation

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)


class LoadWeights:
    """Methods that the server's worker gains; called through `/collective_rpc`."""

    def load_weights_from(self, path: str) -> int:
        weights = load_file(path)
        self.model_runner.get_model().load_weights(weights.items())
        return len(weights)


def share_weights_by_file(client_class: type) -> None:
    """TRL's client streams weights over NCCL, which needs GPUs: write them to shared memory and let the server load the file."""
    memory = Path("/dev/shm")

    def update_named_params(self, metadata, named_params):
        # On every rank's own iteration of the parameters, as TRL's; only rank 0 has a client
        weights = {name: weight.detach().cpu().contiguous().clone() for name, weight in named_params}
        assert list(weights) == [name for name, _, _ in metadata]
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
            path = os.path.join(folder, "weights.safetensors")
            save_file(weights, path)
            answer = self._post(
                f"{self.base_url}/collective_rpc", json={"method": "load_weights_from", "args": [path]}
            )
        assert answer["results"] == [str(len(weights))], answer

    client_class.init_communicator = lambda self, device=0: None
    client_class.update_named_params = update_named_params


if os.environ.get("ERPO_TEST_ENGINE_WORKER"):
    # The server's worker imports this file before it loads the model
    keep_linear_weights()
