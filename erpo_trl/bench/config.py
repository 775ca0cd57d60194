"""BenchConfig: what is measured, on which shapes. Every default stands here."""

from dataclasses import dataclass, field

PARTS = ("positions", "step", "shared_prefix", "scoring", "scaling", "startup", "evaluation")


@dataclass(frozen=True)
class Dimensions:
    """A Qwen2 model built in code with random weights. Args: as in its config."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


@dataclass(frozen=True)
class Shapes:
    """Shapes of a run.

    Args:
        model: dimensions of the model.
        steps: (prompt tokens, completion tokens, K) of the steps.
        prefixes: the same, of the steps whose rows share prompts.
        vocabularies: of the steps, the first also of everything else.
        queries: distinct queries of a step.
        rows: of the scoring pass.
        longest: its longest prompt in tokens, see `mixed_lengths` and `bare_lengths`.
        map_rows: rows of the mappings whose memory and warm time are taken, the second also with a warm table.
        groups, prompts: K and prompt lengths that step time is fitted on.
        samples, new_tokens: of evaluation.
        large: (vocabulary, model) of the first of the steps alone, with one query.
    """

    model: Dimensions
    steps: tuple[tuple[int, int, int], ...]
    prefixes: tuple[tuple[int, int, int], ...]
    vocabularies: tuple[int, ...]
    queries: int
    rows: int
    longest: int
    map_rows: tuple[int, ...]
    groups: tuple[int, ...]
    prompts: tuple[int, ...]
    samples: int
    new_tokens: int
    large: tuple[tuple[int, Dimensions], ...] = ()


# The head has nearly all weights: the most that a query's projections can weigh
NARROW = Dimensions(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=192)
# With 32,768 tokens the head has the share of the weights that it has in Qwen2.5-0.5B, about a quarter
DEEP = Dimensions(hidden=256, layers=24, heads=4, kv_heads=1, intermediate=1024)
QWEN25_05B = Dimensions(hidden=896, layers=24, heads=14, kv_heads=2, intermediate=4864)
SMOKE = Shapes(
    Dimensions(32, 2, 2, 1, 64), ((8, 4, 2),), ((8, 4, 2),), (64,), 2, 32, 24, (20, 40), (2, 4), (4, 8), 4, 4
)
QUICK = Shapes(
    Dimensions(128, 4, 4, 2, 384), ((64, 64, 8), (256, 64, 8), (64, 256, 8)),
    ((64, 64, 8), (256, 64, 8), (64, 256, 8), (1024, 128, 8), (64, 512, 8)), (2048,), 2, 192, 600, (1000, 10_000),
    (2, 4, 8), (32, 128, 512), 24, 32, ((32_768, DEEP), (151_936, NARROW)),
)  # fmt: skip
FULL = Shapes(
    Dimensions(128, 4, 4, 2, 384), QUICK.steps, QUICK.prefixes, (32_768, 151_936), 2, 2048, 600, (1000, 10_000, 100_000), (2, 4, 8, 16),
    (32, 64, 128, 256, 512), 64, 64,
)  # fmt: skip
FULL_GPU = Shapes(
    QWEN25_05B, QUICK.steps, QUICK.prefixes, (151_936, 32_768), 8, 4096, 600, (1000, 10_000, 100_000), (2, 4, 8, 16),
    (32, 64, 128, 256, 512), 256, 256,
)  # fmt: skip


@dataclass
class BenchConfig:
    r"""
    Configuration of `erpo-trl bench`.

    Parameters:
        output (`str`, *optional*, defaults to `"runs/bench"`):
            Folder for `bench.json` (every value), `table.md` (every ratio) and `summary.md` (what is aimed at, for a README).
        parts (`list[str]`, *optional*):
            What to measure, of `positions`, `step`, `shared_prefix`, `scoring`, `scaling`, `startup`, `evaluation`. Default: all.
        model (`str`, *optional*):
            Folder or hub id of a model of yours. Default: a Qwen2 built in code with random weights, small on a CPU, of
            Qwen2.5-0.5B's shape on a GPU.
        shapes (`list[str]`, *optional*):
            Steps as `PROMPTxCOMPLETIONxK`, in tokens and completions a prompt. Default: `64x64x8`, `256x64x8`, `64x256x8`, and for
            `shared_prefix` also `1024x128x8`, `64x512x8`.
        vocabularies (`list[int]`, *optional*):
            Vocabulary sizes of the model built in code. Default: 2048 on a CPU, where the first step is also taken with 32768
            on a deeper model and 151936 on one that is nearly all head; else 151936 and 32768.
        repetitions (`int`, *optional*, defaults to `10`):
            Rounds of every comparison; in each round every side runs once.
        full (`bool`, *optional*, defaults to `False`):
            On a CPU, the vocabularies and row counts of a GPU: hours.
        smoke (`bool`, *optional*, defaults to `False`):
            Seconds: that everything runs. The numbers mean nothing.
        threads (`int`, *optional*, defaults to `1`):
            Threads of a CPU run.
        seed (`int`, *optional*, defaults to `0`):
            Of weights and prompts.
    """

    output: str = field(default="runs/bench", metadata={"help": "Folder for bench.json, table.md and summary.md."})
    parts: list[str] = field(default_factory=lambda: list(PARTS), metadata={"help": f"Of {', '.join(PARTS)}."})
    model: str | None = field(default=None, metadata={"help": "Folder or hub id; default: built in code."})
    shapes: list[str] = field(default_factory=list, metadata={"help": "Steps as PROMPTxCOMPLETIONxK."})
    vocabularies: list[int] = field(default_factory=list, metadata={"help": "Of the model built in code."})
    repetitions: int = field(default=10, metadata={"help": "Rounds of every comparison."})
    full: bool = field(default=False, metadata={"help": "On a CPU, the vocabularies and rows of a GPU: hours."})
    smoke: bool = field(default=False, metadata={"help": "Seconds: that everything runs."})
    threads: int = field(default=1, metadata={"help": "Threads of a CPU run."})
    seed: int = field(default=0, metadata={"help": "Of weights and prompts."})

    def __post_init__(self):
        if isinstance(self.parts, str):
            self.parts = [self.parts]
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise ValueError(f"parts must be of {', '.join(map(repr, PARTS))}, found {unknown[0]!r}")
        for name in ("repetitions", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.full and self.smoke:
            raise ValueError("full and smoke exclude each other: set one")
        if self.vocabularies and self.model:
            raise ValueError("vocabularies are for the model built in code; with model, leave them out")
        self.steps = [_shape(text) for text in self.shapes]

    def resolve(self, gpu: bool) -> Shapes:
        """The shapes of this run."""
        shapes = SMOKE if self.smoke else FULL_GPU if gpu else FULL if self.full else QUICK
        chosen = bool(self.steps or self.vocabularies or self.model)
        return Shapes(
            **{
                **vars(shapes),
                "steps": tuple(self.steps) or shapes.steps,
                "prefixes": tuple(self.steps) or shapes.prefixes,
                "vocabularies": tuple(self.vocabularies) or shapes.vocabularies,
                "large": () if chosen else shapes.large,
            }
        )


def _shape(text: str) -> tuple[int, int, int]:
    try:
        prompt, completion, group = map(int, text.split("x"))
    except ValueError:
        prompt = 0
    if not prompt or min(prompt, completion) < 1 or group < 2:
        raise ValueError(f"shapes must be PROMPTxCOMPLETIONxK with K of at least 2, as in 64x256x8, found {text!r}")
    return prompt, completion, group
