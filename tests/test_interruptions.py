"""A run that is killed or terminated, while scoring or while training, ends as the one that was left alone.

Each run is a process of its own, or two under `accelerate launch`: what survives is what is on disk.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from helpers import UNEQUAL, tiny_model
from launching import SCRIPTS, TIME_LIMIT, accelerate, environment, torchrun

from erpo_trl.query.table import ReferenceTable

pytestmark = pytest.mark.distributed

SCRIPT = str(SCRIPTS / "interrupted_run.py")
STEPS = 6
# Two steps a generation batch
FIELDS = {
    "max_steps": STEPS,
    "num_iterations": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "reference_batch_tokens": 30,
}
ZERO3 = """
compute_environment: LOCAL_MACHINE
num_machines: 1
num_processes: 2
machine_rank: 0
distributed_type: DEEPSPEED
mixed_precision: 'no'
deepspeed_config:
  gradient_accumulation_steps: auto
  zero_stage: 3
  zero3_init_flag: true
"""


class Run:
    """A run in `folder`, started again and again."""

    def __init__(self, folder: Path, fields: dict | None = None):
        self.folder = folder
        self.settings = {"prompts": UNEQUAL, "fields": FIELDS | (fields or {})}
        folder.mkdir(parents=True)
        tiny_model("llama_tied").save_pretrained(folder / "model")

    def start(self, command: list[str], *, prefix=(), variables=None, **settings) -> subprocess.Popen:
        (self.folder / "settings.json").write_text(json.dumps(self.settings | settings))
        with open(self.folder / "output", "a") as output:
            return subprocess.Popen(
                [*prefix, *command],
                env=environment(**(variables or {})),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def events(self, rank: int = 0) -> list[dict]:
        path = self.folder / f"rank{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_pause(self, *launchers: subprocess.Popen, pauses: int = 1, ranks: int = 1) -> None:
        """Until every rank stands where its settings told it to pause."""
        deadline = time.monotonic() + TIME_LIMIT
        while any(sum(e.get("event") == "paused" for e in self.events(rank)) < pauses for rank in range(ranks)):
            ended = [launcher.poll() for launcher in launchers if launcher.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"no pause, {ended}\n{self.output[-8000:]}")
            time.sleep(0.1)

    def kill(self, launcher: subprocess.Popen) -> None:
        """kill -9, launcher and ranks at once; torch's launcher gives each rank a session of its own."""
        processes = [psutil.Process(launcher.pid)]
        processes += processes[0].children(recursive=True)
        for process in processes:
            process.kill()
        launcher.wait(TIME_LIMIT)
        psutil.wait_procs(processes, TIME_LIMIT)

    def finish(self, *launchers: subprocess.Popen) -> dict:
        for launcher in launchers:
            if launcher.wait(TIME_LIMIT):
                raise RuntimeError(self.output[-8000:])
        return self.events()[-1]

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    @property
    def table(self) -> ReferenceTable:
        (folder,) = (self.folder / "reference").iterdir()
        return ReferenceTable(folder)

    def scored(self, ranks: int = 1) -> list[tuple[int, ...]]:
        """Queries that went through a forward."""
        return [
            query
            for rank in range(ranks)
            for event in self.events(rank)
            if event.get("event") == "scored"
            for query in map(tuple, event["queries"])
        ]

    def steps(self) -> dict[int, dict]:
        """The last report of each step."""
        return {event["step"]: event for event in self.events() if "loss" in event}

    def prompts(self) -> list[list[str]]:
        return [event["prompts"] for event in self.events() if event.get("event") == "prompts"]


def assert_checkpoint(run: Run, step: int) -> None:
    assert (run.folder / "run" / f"checkpoint-{step}" / "trainer_state.json").is_file()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody interrupts."""
    run = Run(tmp_path_factory.mktemp("whole") / "run")
    run.finish(run.start(torchrun(SCRIPT, str(run.folder), processes=1)))
    assert len(run.steps()) == 2 * len(run.prompts()) == STEPS
    return run


def assert_same_end(run: Run, whole: Run, tolerance: float) -> None:
    end, expected = run.events()[-1], whole.events()[-1]
    assert end["event"] == expected["event"] == "finished"
    for found, row in zip(end["rows"], expected["rows"], strict=True):
        assert found == pytest.approx(row, abs=tolerance)
    assert end["mean_nll"] == pytest.approx(expected["mean_nll"], rel=tolerance)
    for step, event in whole.steps().items():
        for name in ("loss", "kl", "reward"):
            assert run.steps()[step][name] == pytest.approx(event[name], rel=10 * tolerance, abs=tolerance), (
                step,
                name,
            )


@pytest.mark.parametrize("sharding", [None, pytest.param("zero3", marks=pytest.mark.slow)])
def test_killed_while_scoring_and_while_training(tmp_path, whole, sharding):
    """kill -9 in the middle of the scoring pass, again after step 3, then a resume from checkpoint 2: nothing that was
    written is scored again, and prompts, losses and drift of all steps are those of the run left alone.
    """
    run = Run(tmp_path / "run")
    ranks = 1 if sharding is None else 2
    command = torchrun(SCRIPT, str(run.folder), processes=1)
    if sharding is not None:
        (tmp_path / "accelerate.yaml").write_text(ZERO3)
        command = accelerate(SCRIPT, str(run.folder), config=tmp_path / "accelerate.yaml")

    launcher = run.start(command, pause_in_scoring=3 - ranks)
    run.wait_for_pause(launcher, ranks=ranks)
    run.kill(launcher)
    written = len(run.table)
    assert 0 < written < len(UNEQUAL)
    assert len(run.scored(ranks)) == written

    launcher = run.start(command, pause_after=3)
    run.wait_for_pause(launcher, pauses=2, ranks=ranks)
    run.kill(launcher)
    scored = run.scored(ranks)
    assert len(scored) == len(set(scored)) == len(UNEQUAL), "what was written was scored again"
    assert_checkpoint(run, 2)

    prompts = len(run.prompts())
    end = run.finish(run.start(command, resume=True))
    assert end["world"] == ranks and end["distributed"] == ("NO" if sharding is None else "DEEPSPEED")
    assert len(run.scored(ranks)) == len(scored), "a resumed run scores nothing"
    assert_same_end(run, whole, 1e-6 if sharding is None else 1e-5)
    assert len(run.prompts()) - prompts == (STEPS - 2) / 2
    if ranks == 1:
        assert run.prompts()[prompts:] == whole.prompts()[1:]


@pytest.mark.parametrize("sharding", [None, pytest.param("zero3", marks=pytest.mark.slow)])
def test_terminated_while_training(tmp_path, whole, sharding):
    """SIGTERM inside a generation batch: it is trained to its end, saved, and the process says so and exits with 143. The
    resumed run is the one left alone. Under ZeRO-3 the launcher passes the signal on to both ranks, and has a status of its own.
    """
    run = Run(tmp_path / "run", {"save_strategy": "no"})
    command = torchrun(SCRIPT, str(run.folder), processes=1)
    if sharding is not None:
        (tmp_path / "accelerate.yaml").write_text(ZERO3)
        command = accelerate(SCRIPT, str(run.folder), config=tmp_path / "accelerate.yaml")
    launcher = run.start(command, pause_after=2)
    run.wait_for_pause(launcher, ranks=1 if sharding is None else 2)
    launcher.terminate()
    status = launcher.wait(TIME_LIMIT)
    assert status == 128 + signal.SIGTERM if sharding is None else status
    assert "Terminated by SIGTERM after step 4 of 6" in run.output and "resume_from_checkpoint=True" in run.output
    assert max(run.steps()) == 4
    assert_checkpoint(run, 4)
    run.finish(run.start(command, resume=True))
    assert_same_end(run, whole, 1e-6 if sharding is None else 1e-5)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def two_hosts():
    """((command prefix, address, environment) of two machines): network namespaces joined by a cable, where the system lets
    this process make them, else twice this machine on loopback.
    """
    names = [f"erpo-{os.getpid()}-{side}" for side in "ab"]
    cables = [f"e{os.getpid() % 100000}{side}" for side in "ab"]
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add {cables[0]} netns {names[0]} type veth peer name {cables[1]} netns {names[1]}",
        *(
            f"ip -n {name} {command}"
            for number, (name, cable) in enumerate(zip(names, cables), start=1)
            for command in (f"addr add 10.77.0.{number}/24 dev {cable}", f"link set {cable} up", "link set lo up")
        ),
    ]
    try:
        if shutil.which("ip") is None:
            made = False
        else:
            made = all(
                subprocess.run(command.split(), capture_output=True, timeout=20).returncode == 0
                for command in commands
            )
        if made:
            yield [
                (["ip", "netns", "exec", name], "10.77.0.1", {"GLOO_SOCKET_IFNAME": cable})
                for name, cable in zip(names, cables)
            ]
        else:
            yield [([], "127.0.0.1", {})] * 2
    finally:
        for name in names:
            if shutil.which("ip"):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


@pytest.mark.slow
def test_two_machines(tmp_path, whole, two_hosts):
    """One process on each of two machines. First twice on loopback, where SIGTERM reaches one machine only and both stop
    after the same step; then the resume, in two network namespaces where the system allows it.
    """
    run = Run(tmp_path / "run")
    (tmp_path / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 2\n"
        "rdzv_backend: static\nsame_network: true\nuse_cpu: true\nmixed_precision: 'no'\n"
    )

    def start(hosts, **settings):
        port = free_port()
        return [
            run.start(
                accelerate(
                    SCRIPT,
                    str(run.folder),
                    config=tmp_path / "accelerate.yaml",
                    options=(
                        "--machine_rank",
                        str(rank),
                        "--main_process_ip",
                        address,
                        "--main_process_port",
                        str(port),
                    ),
                ),
                prefix=prefix,
                variables={"ACCELERATE_USE_CPU": "true"} | variables,
                **settings,
            )
            for rank, (prefix, address, variables) in enumerate(hosts)
        ]

    machines = start([([], "127.0.0.1", {})] * 2, pause_after=2)
    run.wait_for_pause(*machines, ranks=2)
    machines[1].terminate()
    codes = [machine.wait(TIME_LIMIT) for machine in machines]
    assert all(codes), codes
    assert run.output.count("Terminated by SIGTERM after step 4 of 6") >= 1
    assert max(run.steps()) == 4
    assert_checkpoint(run, 4)

    end = run.finish(*start(two_hosts, resume=True))
    assert end["world"] == 2 and end["distributed"] in ("MULTI_CPU", "MULTI_GPU")
    assert_same_end(run, whole, 1e-5)
