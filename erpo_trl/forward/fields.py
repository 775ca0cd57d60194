"""The config field of the forwards."""

from dataclasses import dataclass, field

from ..query.validation import require_one_of


@dataclass
class ForwardFields:
    r"""
    How the forwards of a trainer that generates are run.

    Parameters:
        shared_prefix (`str`, *optional*, defaults to `"off"`):
            Whether the completions of a query share its prompt in forwards of the policy and of TRL's reference: a prompt that
            several rows of a micro-batch have runs through the layers once, forward and backward, with the same log-probs,
            entropies and gradients up to rounding. `"on"`: wherever two rows share a prompt; `"auto"`: where it is
            reckoned to save a twentieth of the layers' time, see docs/cost.md; `"off"`: never. Off is the default because rounding
            differs: with α = 0 and uniform weights the trainer is TRL's bit for bit. Rows change places among the micro-batches of an optimizer step
            so that those of a query meet, where the step does not depend on it. Models for which it is not exact run as they do
            without, with a line in the log. With dropout, rows that share a prompt share its draw.
    """

    shared_prefix: str = field(
        default="off",
        metadata={
            "help": "Run a prompt once for all completions of a micro-batch that share it: off, on, or auto (where it pays)."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.shared_prefix, bool):
            # YAML 1.1 reads `on` and `off` as switches
            self.shared_prefix = "on" if self.shared_prefix else "off"
        require_one_of("shared_prefix", self.shared_prefix, ("off", "on", "auto"))
        if self.shared_prefix != "off" and self.torch_compile:
            raise ValueError(
                f"shared_prefix={self.shared_prefix!r} changes the rows that the model's layers see, which a compiled model does "
                "not follow: set it to 'off', or torch_compile to False."
            )
