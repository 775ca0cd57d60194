"""Several references: the pre-RL policy beside other models or their tables, each with a weight λ.

The pre-RL policy goes by the name "self". The weights on the advantages read it alone, whatever the others say.
"""

import gc
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, List, Value
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import find_adapter_config_file, logging

from .divergence import ESTIMATORS, query_kl
from .fingerprint import key_of_row
from .reference import DatasetMapper
from .rows import attach_columns
from .table import ReferenceTable

logger = logging.get_logger(__name__)

SELF = "self"
MODES = ("sum", "mixture")
# The columns of a data set with several references, beside those of the pre-RL policy
SEVERAL_FEATURES = {
    "other_query_logps": List(List(Value("float32"))),  # per other reference, one per scored token, nats
    "reference_weight": List(Value("float32")),  # λ, in the order of `query_references`
}


@dataclass(frozen=True)
class ReferenceSpec:
    """One reference: its name, its λ, and where its log-probs come from (for "self" neither)."""

    name: str
    weight: float
    model: str | None = None
    table: str | None = None


def parse_references(value) -> tuple[ReferenceSpec, ...]:
    """`query_references` as specs. Raises ValueError that names what is wrong."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"query_references is not a mapping, nor JSON of one: {error}.") from error
    if not isinstance(value, dict) or not value:
        raise ValueError(f"query_references must map names to references, found {value!r}.")
    specs = []
    for name, entry in value.items():
        entry = entry if isinstance(entry, dict) else {"weight": entry}
        if not isinstance(name, str):
            raise ValueError(f"query_references has the name {name!r}: names must be text.")
        unknown = sorted(set(entry) - {"weight", "model", "table"})
        sources = [key for key in ("model", "table") if entry.get(key) is not None]
        if unknown:
            raise ValueError(f"query_references[{name!r}] has no {unknown[0]!r}: give weight, and model or table.")
        if len(sources) != (0 if name == SELF else 1):
            raise ValueError(
                f"query_references[{name!r}] needs "
                + (
                    "a weight alone: it is the model that trains, before RL."
                    if name == SELF
                    else "either model or table."
                )
            )
        for key in sources:
            if not isinstance(entry[key], str):
                raise ValueError(f"query_references[{name!r}]: {key} must be text, found {entry[key]!r}.")
        try:
            weight = float(entry.get("weight", math.nan))
        except (TypeError, ValueError):
            weight = math.nan
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"query_references[{name!r}] needs a weight, a finite number >= 0, found {entry.get('weight')!r}."
            )
        specs.append(ReferenceSpec(name, weight, entry.get("model"), entry.get("table")))
    if not any(spec.weight for spec in specs):
        raise ValueError(
            "query_references are all of weight 0: nothing would be held. Set query_kl_coef=0 to measure only."
        )
    return tuple(specs)


def several_query_kl(
    logps: Tensor,
    ref_logps: Tensor,
    weights: Tensor,
    mask: Tensor,
    mode: str = "sum",
    estimator: str = "k3",
    level: str = "token",
    length_normalize: bool = False,
) -> Tensor:
    """Drift of each query's likelihood from several references.

    Args:
        logps: (Q, T) under the policy, nats; ref_logps: (Q, K, T) under the references; weights: (Q, K) λ >= 0.
        mask: (Q, T) True where a token is scored.
        mode: `sum`: Σ_k λ_k R̂_k. `mixture`: the estimator on log Σ_k λ_k e^{ℓ_k} - ℓ_θ, one number per query, ℓ the
            log-likelihood of the whole query; λ sums to 1.
        estimator, level, length_normalize: see `query_kl`; `mixture` is of the level `sequence`.

    Returns:
        (Q,) in nats; 0 for a query with no scored token.
    """
    mask = mask.bool()
    if mode == "sum":
        drifts = [query_kl(logps, ref, mask, estimator, level, length_normalize) for ref in ref_logps.unbind(1)]
        return (torch.stack(drifts, 1) * weights).sum(1)
    likelihoods = torch.where(mask.unsqueeze(1), ref_logps, 0.0).sum(-1)  # (Q, K)
    mixture = torch.logsumexp(likelihoods + weights.log(), dim=1)
    x = mixture - torch.where(mask, logps, 0.0).sum(-1)
    count = mask.sum(-1)
    value = ESTIMATORS[estimator](x / count.clamp(min=1) if length_normalize else x)
    return torch.where(count > 0, value, 0.0)


class OtherReferences:
    """Attaches the other references' log-probs, and each row's λ, to data sets that hold the pre-RL policy's.

    Args:
        specs: of all references.
        mapper: the pre-RL policy's.
        load: name or folder -> a model on this process' device.
        column: of the data set, with each row's λ (a list in the order of `specs`, or a mapping by name); None for those of
            the specs.
        mixture: whether λ must sum to 1.
    """

    def __init__(
        self,
        specs: tuple[ReferenceSpec, ...],
        mapper: DatasetMapper,
        load: Callable[[str], torch.nn.Module],
        column: str | None,
        mixture: bool,
    ):
        self.specs, self.mapper, self.load, self.column, self.mixture = specs, mapper, load, column, mixture

    def __call__(self, dataset: Dataset) -> Dataset:
        """The data set with `SEVERAL_FEATURES`.

        Raises: ValueError: a row's λ, or a row that is missing from a table, named by its index.
        """
        weights = self._weights(dataset)
        tokens = [len(row) for row in dataset["ref_query_logps"]]
        others = [self._logps(spec, dataset, tokens) for spec in self.specs if spec.name != SELF]

        def attach(batch: dict, rows: list[int]) -> dict:
            return {
                "other_query_logps": [[logps[row] for logps in others] for row in rows],
                "reference_weight": weights[rows].tolist(),
            }

        contents = [repr(self.specs), weights, *(row for logps in others for row in logps)]
        shown = not self.mapper.config.disable_tqdm
        return attach_columns(dataset, attach, SEVERAL_FEATURES, contents, "Attaching the other references", shown)

    def _weights(self, dataset: Dataset) -> np.ndarray:
        """(N, K) λ of each row."""
        names = [spec.name for spec in self.specs]
        if self.column is None:
            return np.tile(np.array([spec.weight for spec in self.specs], dtype=np.float32), (len(dataset), 1))
        if self.column not in dataset.column_names:
            raise ValueError(
                f"query_references_column={self.column!r} is no column of the data set, which has {dataset.column_names}."
            )
        rows = []
        for row, value in enumerate(dataset[self.column]):
            value = [value.get(name) for name in names] if isinstance(value, dict) else value
            good = isinstance(value, list) and len(value) == len(names)
            good = good and all(isinstance(x, (int, float)) and math.isfinite(x) and x >= 0 for x in value)
            if not good or (self.mixture and abs(sum(value) - 1) > 1e-4):
                total = ", summing to 1" if self.mixture else ""
                raise ValueError(
                    f"Row {row} of the data set: {self.column!r} must hold {len(names)} numbers >= 0{total}, for "
                    f"{', '.join(names)}; found {value!r}."
                )
            rows.append(value)
        weights = np.array(rows, dtype=np.float32)
        self._refuse_two_weights(dataset, weights)
        return weights

    def _refuse_two_weights(self, dataset: Dataset, weights: np.ndarray) -> None:
        """Raise for rows of one prompt with different λ: a step scores a query once, for all of its rows."""
        first: dict[tuple, int] = {}
        for row, (name, span) in enumerate(zip(dataset["query_fingerprint"], dataset["query_span"])):
            same = first.setdefault((name, *span), row)
            if (weights[row] != weights[same]).any():
                raise ValueError(
                    f"Rows {same} and {row} of the data set have the same prompt, and different {self.column!r}: "
                    f"{weights[same].tolist()} and {weights[row].tolist()}. Give all rows of a prompt the same."
                )

    def _logps(self, spec: ReferenceSpec, dataset: Dataset, tokens: list[int]) -> list[np.ndarray]:
        """(T-1,) log-probs of each row's prompt under one reference."""
        if spec.table is not None:
            if not Path(spec.table).is_dir():
                raise ValueError(f"query_references[{spec.name!r}]: there is no table {spec.table}.")
            self._check_temperature(spec)
            table = ReferenceTable(spec.table)
            keys = np.array([key_of_row(name) for name in dataset["query_fingerprint"]], dtype=np.int64)
            missing = [row for row in np.flatnonzero(~table.contains(keys)) if tokens[row]]
            if missing:
                raise ValueError(
                    f"query_references[{spec.name!r}]: {len(missing)} of {len(keys)} rows are not in the table {spec.table}, row "
                    f"{missing[0]} the first. Make it with the same data and tokenizer (erpo-trl score), or give the model."
                )
            rows = np.flatnonzero(tokens)
            found = dict(zip(rows.tolist(), table.take(keys[rows])))
            return [
                found[row].values.to_numpy() if row in found else np.empty(0, np.float32) for row in range(len(keys))
            ]
        model = self.load(spec.model)
        rows = model.get_input_embeddings().num_embeddings
        tokenizer = getattr(self.mapper.processing_class, "tokenizer", self.mapper.processing_class)
        if rows < len(tokenizer):
            raise ValueError(
                f"query_references[{spec.name!r}]: {spec.model} has {rows} token embeddings, the tokenizer {len(tokenizer)} "
                "tokens. A reference must share the policy's tokenizer."
            )
        mapper = DatasetMapper(
            model,
            self.mapper.processing_class,
            self.mapper.config,
            tokenize=self.mapper.tokenize,
            template=self.mapper.template,
            autocast_dtype=self.mapper.autocast_dtype,
            precision=self.mapper.precision,
        )
        mapped = mapper(dataset.select_columns("prompt"))
        logger.info(f"query_references[{spec.name!r}]: {mapper.report}")
        if len(mapped) < len(dataset):
            raise ValueError(
                f"query_references[{spec.name!r}]: {len(dataset) - len(mapped)} prompts are too long for {spec.model}: lower "
                "max_prompt_length."
            )
        logps = [np.asarray(row, dtype=np.float32) for row in mapped["ref_query_logps"]]
        del model, mapper
        gc.collect()
        return logps

    def _check_temperature(self, spec: ReferenceSpec) -> None:
        """Raise for a table whose log-probs were read at another temperature than the policy's are."""
        path = Path(spec.table) / "reference.json"
        if not path.is_file():
            return  # a table that nobody described
        found, wanted = json.loads(path.read_text())["head"]["temperature"], self.mapper.config.temperature
        if found != wanted:
            raise ValueError(
                f"query_references[{spec.name!r}]: the table {spec.table} was scored with temperature={found}, this run has "
                f"{wanted}: log-probs of the two cannot be compared. Score it again (erpo-trl score --temperature {wanted})."
            )


def load_reference(
    name: str, policy: torch.nn.Module, init_kwargs: dict, device: torch.device, sharded: bool
) -> torch.nn.Module:
    """A reference model for the scoring pass, in evaluation mode, in the policy's dtype.

    Raises: ValueError: the processes share a sharded model, whose loader would spread this one as well.
    """
    if sharded:
        raise ValueError(
            f"query_references: the model {name} cannot be scored while DeepSpeed ZeRO-3 or FSDP spreads the policy. Score it "
            "beforehand (erpo-trl score --model_name_or_path ...) and give its table."
        )
    if find_adapter_config_file(name) is not None:
        raise ValueError(
            f"query_references: {name} is an adapter; merge it into its base (`PeftModel.merge_and_unload`) and give that model, or "
            "the table that a run on it made."
        )
    names = ("attn_implementation", "trust_remote_code")
    kept = {key: init_kwargs[key] for key in names if init_kwargs.get(key) is not None}
    # That of the embeddings, which no quantization packs; the policy may be given as an object that TRL has not loaded
    dtype = policy.get_input_embeddings().weight.dtype
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **kept)
    return model.to(device).eval().requires_grad_(False)


def stack_references(
    columns: list[dict], specs: tuple[ReferenceSpec, ...], ref_logps: Tensor
) -> tuple[Tensor, Tensor]:
    """What the loss needs of a batch's rows: (B, K, P-1) log-probs in the order of `specs`, and (B, K) λ.

    Args: columns: per row `SEVERAL_FEATURES`; ref_logps: (B, P-1) of the pre-RL policy, padded on the left.
    """
    rows, width = ref_logps.shape
    stacked = torch.zeros(rows, len(specs), width, dtype=ref_logps.dtype, device=ref_logps.device)
    names = [spec.name for spec in specs]
    others = [k for k, name in enumerate(names) if name != SELF]
    if SELF in names:
        stacked[:, names.index(SELF)] = ref_logps
    for row, column in enumerate(columns):
        for k, logps in zip(others, column["other_query_logps"]):
            if len(logps):
                stacked[row, k, width - len(logps) :] = torch.tensor(np.asarray(logps), dtype=ref_logps.dtype)
    weights = torch.tensor(np.array([column["reference_weight"] for column in columns]), dtype=ref_logps.dtype)
    return stacked, weights.to(ref_logps.device)
