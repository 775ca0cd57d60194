"""Where a run can be resumed: between generation batches, since the completions of one are not in a checkpoint."""

import math


def inside_generation(step: int, generate_every: int, accumulation: int, generations: int | None) -> bool:
    """Whether completions are left over after `step` optimizer steps; each epoch begins with a new generation batch.

    Args: generate_every, accumulation: as below; generations: generation batches of an epoch, None for a stream.
    """
    if generations is not None:
        # An epoch's last step may have fewer micro-batches than the others
        step %= max(1, math.ceil(generations * generate_every / accumulation))
    return step * accumulation % generate_every != 0


def generation_window(generate_every: int, accumulation: int) -> int:
    """Optimizer steps between two points where a step ends and no generated completion is left over.

    Args:
        generate_every: micro-batches that one generation serves (steps_per_generation x num_iterations).
        accumulation: micro-batches of one optimizer step.
    """
    return generate_every // math.gcd(generate_every, accumulation)
