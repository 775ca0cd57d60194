"""Where a run can be resumed: between generation batches, since the completions of one are not in a checkpoint."""

import math

from datasets import Dataset


def inside_generation(step: int, args, dataset) -> bool:
    """Whether completions are left over after `step` optimizer steps; each epoch begins with a new generation batch.

    Args: args: a config of TRL's trainers that generate; dataset: the training data, a stream or one with a length.
    """
    generate_every, accumulation = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    if isinstance(dataset, Dataset):
        generations = len(dataset) // (args.generation_batch_size // args.num_generations)
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
