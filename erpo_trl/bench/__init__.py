"""What ERPO costs, side by side with what it is compared to: `erpo-trl bench`. One file per thing measured."""

import os

# Read when torch is loaded: PyTorch's profiler, which counts bytes on a CPU, reports to the terminal that it starts and that
# older tensors are released
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
