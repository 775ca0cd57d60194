"""Which model an evaluation is of: where its weights are, and a name for them that changes when they do."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file, find_adapter_config_file
from transformers.utils.hub import extract_commit_hash

from ..demo import MODEL_DIR

# Files at the top of a model folder that decide what it generates; what else lies there does not. By ending, since tokenizers of
# many kinds name theirs as they like, but for those that training, evaluation and users are known to leave there.
_DECISIVE = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")
_NEUTRAL = (
    "training_args.bin", "optimizer.bin", "scheduler.bin", "trainer_state.json", "erpo_state.json", "metrics.json", "result.json",
    "*_results.json", "log_history.json", "modelcard.json", "prompt_time.txt", "log.txt", "requirements.txt", "LICENSE.txt",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSource:
    """A model as a user names it, resolved.

    Args: name: folder or hub id of the model, the base model under an adapter; revision: its hub revision; adapter: folder or
    hub id of a LoRA adapter, or None; adapter_revision: its hub revision; tokenizer: where the tokenizer is; weights: commit
    on the hub or digest of a folder, of both.
    """

    name: str
    revision: str | None
    adapter: str | None
    adapter_revision: str | None
    tokenizer: str
    weights: str

    def record(self) -> dict:
        """For `metrics.json`."""
        return asdict(self)


def resolve_model(name: str, revision: str | None = None) -> ModelSource:
    """Where a model's weights and tokenizer are.

    Args: name: a folder, a hub id, or "demo" for the embedded model; a LoRA adapter stands for its base model with it;
    revision: hub revision of `name`.
    Raises: OSError or ValueError that says what was not found.
    """
    name = str(MODEL_DIR) if name == "demo" else name
    if Path(name).is_dir() and revision is not None:
        raise ValueError(f"model {name} is a folder: it has no revision, found {revision!r}")
    try:
        adapter_config = find_adapter_config_file(name, revision=revision)
        weights = _weights(name, revision, "config.json") if adapter_config is None else None
    except (OSError, ValueError) as error:
        if Path(name).is_dir():
            raise
        # transformers takes whatever is no folder for a hub id, and speaks of nothing else
        raise ValueError(
            f"model: there is no folder {name!r} (looked for {Path(name).resolve()}), and on the hub: {error}"
        ) from error
    if adapter_config is None:
        return ModelSource(name, revision, None, None, name, weights)
    config = json.loads(Path(adapter_config).read_text())
    base, base_revision = config["base_model_name_or_path"], config.get("revision")
    try:
        base_weights = _weights(base, base_revision, "config.json")
    except OSError as error:
        raise ValueError(
            f"adapter {name}: its base model {base!r} is not there ({error}). Correct base_model_name_or_path in its "
            "adapter_config.json"
        ) from error
    # A tokenizer saved with the adapter may hold the chat template of the training
    own = cached_file(name, "tokenizer_config.json", revision=revision, _raise_exceptions_for_missing_entries=False)
    weights = f"{base_weights}+{_weights(name, revision, 'adapter_config.json')}"
    return ModelSource(base, base_revision, name, revision, name if own else base, weights)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer, padding on the left."""
    revision = source.adapter_revision if source.tokenizer == source.adapter else source.revision
    return AutoTokenizer.from_pretrained(source.tokenizer, revision=revision, padding_side="left")


def _weights(name: str, revision: str | None, config: str) -> str:
    """The commit of a hub model; of a folder, a digest of its files' contents."""
    folder = Path(name)
    if not folder.is_dir():
        return extract_commit_hash(cached_file(name, config, revision=revision), None)
    digest = xxhash.xxh3_128()
    for path in sorted(folder.iterdir()):
        neutral = any(path.match(pattern) for pattern in _NEUTRAL)
        if path.suffix in _DECISIVE and not neutral and path.is_file():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                while chunk := file.read(1 << 24):
                    digest.update(chunk)
    return digest.hexdigest()
