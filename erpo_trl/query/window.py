"""Where a run can be resumed: between generation batches, since the completions of one are not in a checkpoint."""

import math


def generation_window(generate_every: int, accumulation: int) -> int:
    """Optimizer steps between two points where a step ends and no generated completion is left over.

    Args:
        generate_every: micro-batches that one generation serves (steps_per_generation x num_iterations).
        accumulation: micro-batches of one optimizer step.
    """
    return generate_every // math.gcd(generate_every, accumulation)
