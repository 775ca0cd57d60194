"""Launches of several processes: torchrun and accelerate on this machine, always with a time limit."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
TIME_LIMIT = 240  # seconds; a deadlock ends here


def environment(**more) -> dict[str, str]:
    """This process's environment for a launched one: one thread each, no rank of an outer launch."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        and not name.startswith(("ACCELERATE_", "FSDP_"))
    }
    return (
        inherited
        | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        | {"PYTHONUNBUFFERED": "1"}
        | more
    )


def torchrun(*arguments: str, processes: int) -> list[str]:
    """The command that runs a script in so many processes, or in this one's interpreter for one."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else []), *arguments]


def accelerate(*arguments: str, config: Path, options: tuple[str, ...] = ()) -> list[str]:
    """The command of `accelerate launch`, on a port that the machine chooses."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--main_process_port", "0"]
    return [sys.executable, *launcher, *options, *arguments]


def finish(command: list[str], **variables) -> str:
    """Run to the end and return what it printed; raise with it if it fails."""
    done = subprocess.run(
        command,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-8000:])
    return done.stdout
