"""A run that collapses, noticed while it trains."""

import math
from collections.abc import Callable
from typing import Literal

from transformers import TrainerCallback, TrainerControl
from transformers.utils import logging

from ..query.window import inside_generation
from .analysis import SIGNS, BandRule, Collapse, CollapseWatch, log_series

logger = logging.get_logger(__name__)


class CollapseCallback(TrainerCallback):
    """Warns when the entropy jumps or the reward falls out of its running band, and stops the run or does what it is told.

    Both series are read from the log, so a point is `logging_steps` steps. What a resumed run logged before counts for the band.

    Args:
        on_collapse: `"warn"`: a warning in the log; `"stop"`: also a checkpoint, where `save_strategy` is not `"no"`, and the end of
            the run, at the end of the generation batch, since no run is resumed from inside one; or a function of the
            [`~erpo_trl.report.analysis.Collapse`] and transformers' `TrainerControl`, called on every process after the warning, e.g. to lower the drift that an adaptive α holds.
        rule: [`~erpo_trl.report.analysis.BandRule`], when a series has left its band.

    Example:
        ```python
        def hold_harder(collapse, control):
            trainer.adaptive_alpha.target /= 2  # with query_kl_target; a fixed α is trainer.args.query_kl_coef

        trainer.add_callback(CollapseCallback(on_collapse=hold_harder))
        ```

    Attributes:
        found: the collapses noticed so far by this callback.
    """

    def __init__(
        self,
        on_collapse: Literal["warn", "stop"] | Callable[[Collapse, TrainerControl], None] = "warn",
        rule: BandRule | None = None,
    ):
        if on_collapse not in ("warn", "stop") and not callable(on_collapse):
            raise ValueError(f"on_collapse must be 'warn', 'stop' or a function, found {on_collapse!r}.")
        self.on_collapse, self.rule = on_collapse, rule or BandRule()
        self.found: list[Collapse] = []
        self._stopping = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._stopping = False
        self._watch = CollapseWatch(self.rule)
        for name in SIGNS:
            for step, value in zip(*log_series(state.log_history, name)):
                self._watch.add(name, step, value)

    def on_log(self, args, state, control, logs=None, **kwargs):
        # Every process has the same metrics, TRL gathers them, so all come to the same decision
        for name in SIGNS:
            value = logs.get(name)
            if value is None or not math.isfinite(value):
                continue
            collapse = self._watch.add(name, state.global_step, value)
            if collapse is None:
                continue
            self.found.append(collapse)
            if state.is_world_process_zero:
                logger.warning(f"The run may be collapsing: {collapse}.")
            if self.on_collapse == "stop":
                self._stopping = True
            elif self.on_collapse != "warn":
                self.on_collapse(collapse, control)
        return self._stop(args, state, control, **kwargs)

    def on_step_end(self, args, state, control, **kwargs):
        return self._stop(args, state, control, **kwargs)

    def _stop(self, args, state, control, train_dataloader=None, **kwargs) -> TrainerControl:
        generates = hasattr(args, "steps_per_generation")
        dataset = getattr(train_dataloader, "dataset", None)
        if self._stopping and not (generates and inside_generation(state.global_step, args, dataset)):
            control.should_training_stop = True
            control.should_save |= args.save_strategy != "no"
        return control
