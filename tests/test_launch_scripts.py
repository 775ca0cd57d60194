"""The launch scripts, run with commands that only write down how they were called."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from trl import TrlParser
from trl.scripts.vllm_serve import make_parser

from erpo_trl.train import configs_of

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "recipes" / "launch").iterdir())
MULTI_NODE = "recipes/launch/multi_node.slurm"
RECIPE_32B = "recipes/qwen2.5-32b/erpo.yaml"

RECORD = f"""#!{sys.executable}
import glob, json, os, signal, sys, time
name = os.path.basename(sys.argv[0])
path = os.path.join(os.environ["CALLS"], f"{{name}}-{{os.getpid()}}.json")
with open(path + ".part", "w") as file:
    json.dump(sys.argv[1:], file)
os.replace(path + ".part", path)
def save(*_):
    time.sleep(1)
    open(path + ".saved", "w").close()
    sys.exit(143)
if name == "accelerate":
    signal.signal(signal.SIGTERM, save)
if name == "trl":
    time.sleep(float(os.environ["SERVER_SECONDS"]))
if name == "accelerate":
    while os.environ.get("AWAIT_SERVER") and not glob.glob(os.path.join(os.environ["CALLS"], "trl-*.json")):
        time.sleep(0.1)  # as training does, which needs the server
    time.sleep(float(os.environ["TRAINING_SECONDS"]))
    sys.exit(int(os.environ.get("TRAINING_STATUS", "0")))
"""
# Starts the command once per task, as srun would on that many nodes, and waits for all. On SIGTERM it kills them, as srun does.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do
    case $1 in --ntasks=*) tasks=${1#*=};; --nodelist=*) nodes=${1#*=};; --job-name=*) step=${1#*=};; esac
    shift
done
echo "$nodes" >> "$CALLS/nodes"
status=0
for ((rank = 0; rank < tasks; rank++)); do SLURM_PROCID=$rank "$@" & pids+=($!); done
echo "${pids[@]}" > "$CALLS/pids-$step"
trap 'kill -KILL "${pids[@]}" 2>/dev/null' TERM
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid" || status=$?; done
done
exit $status
"""
SQUEUE = '#!/bin/bash\nprintf "%s\\n" "7.0 vllm" "7.1 training"\n'
# The step's own processes get the signal
SCANCEL = '#!/bin/bash\n[ "$*" = "--signal=TERM 7.1" ] && kill -TERM $(cat "$CALLS/pids-training")\n'
SCONTROL = '#!/bin/bash\nprintf "%s\\n" node1 node2 node3\n'


@pytest.fixture
def run(tmp_path):
    """`run(script, *arguments, **environment)`: the finished process, and the calls it made by command. `terminate_after`: SIGTERM
    to the script once it has made so many calls.
    """
    commands, calls = tmp_path / "bin", tmp_path / "calls"
    commands.mkdir()
    calls.mkdir()
    for name, text in {
        "accelerate": RECORD,
        "trl": RECORD,
        "srun": SRUN,
        "scontrol": SCONTROL,
        "squeue": SQUEUE,
        "scancel": SCANCEL,
    }.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)

    def go(script, *arguments, terminate_after=0, **environment):
        environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "SERVER_SECONDS": "60",
            "TRAINING_SECONDS": "0",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_JOB_NODELIST": "node[1-3]",
            **environment,
        }
        job = subprocess.Popen(
            ["bash", str(ROOT / script), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        while terminate_after and len(list(calls.glob("*.json"))) < terminate_after:
            assert job.poll() is None, job.communicate()
            time.sleep(0.05)
        if terminate_after:
            time.sleep(0.5)  # the last one may have told of itself only
            job.terminate()  # as `--signal=B:TERM@900`: the script alone gets it
        output, errors = job.communicate(timeout=60)
        done = subprocess.CompletedProcess(job.args, job.returncode, output, errors)
        made = {name: [] for name in ("accelerate", "trl")}
        for path in sorted(calls.glob("*.json")):
            made[path.name.rpartition("-")[0]].append(json.loads(path.read_text()))
        return done, made

    go.calls = calls
    return go


def launched(call: list[str]):
    """The arguments as `accelerate launch` takes them, after the checks it makes itself; and those of `erpo-trl train`."""
    assert call[0] == "launch"
    arguments = _validate_launch_command(launch_command_parser().parse_args(call[1:]))[0]
    assert arguments.module and arguments.training_script == "erpo_trl.cli"
    command, *options = arguments.training_script_args
    assert command == "train"
    at = options.index("--config")
    assert (ROOT / options[at + 1]).is_file()
    # Without the recipe, whose GPU settings this machine may refuse: names and types
    _, unknown = TrlParser(configs_of("grpo"), allow_abbrev=False).parse_known_args(options[:at] + options[at + 2 :])[
        -2:
    ]
    assert not unknown
    return arguments, options


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_bash_and_names_files_that_exist(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    named = re.findall(r"recipes/[\w./-]+\.(?:yaml|sh|slurm)", path.read_text())
    assert named
    for name in named:
        assert (ROOT / name).is_file(), name


def test_single_node(run):
    recipe = "recipes/qwen2.5-math-7b/erpo.yaml"
    arguments = [recipe, "recipes/accelerate/zero2.yaml", "--resume_from_checkpoint", "true"]
    done, calls = run("recipes/launch/single_node.slurm", *arguments)
    assert done.returncode == 0, done.stderr
    launch, options = launched(calls["accelerate"][0])
    assert (launch.num_processes, launch.num_machines, launch.zero_stage) == (8, 1, 2)
    assert options == ["--config", recipe, "--resume_from_checkpoint", "true"]


def test_multi_node(run):
    """ZeRO-3 on the first two of three nodes, the server on the third; the job ends with the training."""
    done, calls = run(MULTI_NODE, RECIPE_32B, "--max_steps", "4", AWAIT_SERVER="1")
    assert done.returncode == 0, done.stderr
    assert sorted((run.calls / "nodes").read_text().split()) == ["node1,node2", "node3"]
    launches = [launched(call) for call in calls["accelerate"]]
    assert sorted(int(launch.machine_rank) for launch, _ in launches) == [0, 1]
    for launch, options in launches:
        assert (launch.num_machines, launch.num_processes, launch.zero_stage) == (2, 16, 3)
        assert (launch.main_process_ip, launch.main_process_port) == ("node1", 29500)
        assert options[:2] == ["--config", RECIPE_32B]
        assert options[options.index("--vllm_server_host") + 1] == "node3"
        assert options[-2:] == ["--max_steps", "4"]
    (serve,) = calls["trl"]
    assert serve[0] == "vllm-serve"
    (server,) = make_parser().parse_args_into_dataclasses(serve[1:])
    assert server.model == yaml.safe_load((ROOT / RECIPE_32B).read_text())["model_name_or_path"]
    assert server.tensor_parallel_size == 8


def test_multi_node_passes_on_how_training_ended(run):
    assert run(MULTI_NODE, RECIPE_32B, TRAINING_STATUS="3")[0].returncode == 3


def test_multi_node_ends_when_the_server_does(run):
    """Ranks that wait for completions from a dead server would hold their nodes until the job's time is up."""
    done, _ = run(MULTI_NODE, RECIPE_32B, SERVER_SECONDS="0", TRAINING_SECONDS="60")
    assert done.returncode == 1
    assert "The vLLM server ended (status 0) while training was running." in done.stderr


@pytest.mark.parametrize(
    "script, arguments, calls",
    [
        (MULTI_NODE, [RECIPE_32B], 3),
        (
            "recipes/launch/single_node.slurm",
            ["recipes/qwen2.5-math-7b/erpo.yaml", "recipes/accelerate/zero2.yaml"],
            1,
        ),
    ],
)
def test_terminated_jobs_wait_for_the_checkpoint(run, script, arguments, calls):
    """The signal reaches every training process, and the job ends when they have saved, within the time that SLURM leaves."""
    done, made = run(script, *arguments, terminate_after=calls, TRAINING_SECONDS="50")
    assert done.returncode == 143, done.stderr
    assert len(list(run.calls.glob("accelerate-*.saved"))) == len(made["accelerate"]) == max(1, calls - 1)
    text = (ROOT / script).read_text()
    notice = int(re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", text, re.M)[1])
    assert 600 < int(re.search(r"^export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", text, re.M)[1]) < notice


@pytest.mark.parametrize(
    "arguments, environment, message",
    [
        ([], {}, "usage: sbatch recipes/launch/multi_node.slurm RECIPE [options]"),
        ([RECIPE_32B], {"SLURM_JOB_NUM_NODES": "2"}, "give --nodes=3, found 2."),
        (["recipes/qwen2.5-math-7b/erpo.yaml"], {}, "does not set vllm_mode: server"),
    ],
)
def test_multi_node_refuses(run, arguments, environment, message):
    done, calls = run(MULTI_NODE, *arguments, **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert calls == {"accelerate": [], "trl": []}


def test_plain_multi_node(run):
    done, calls = run("recipes/launch/multi_node.sh", "1", "10.0.0.1", RECIPE_32B, "--vllm_server_host", "10.0.0.3")
    assert done.returncode == 0, done.stderr
    launch, options = launched(calls["accelerate"][0])
    assert (int(launch.machine_rank), launch.main_process_ip, launch.num_machines, launch.num_processes) == (
        1,
        "10.0.0.1",
        2,
        16,
    )
    assert options == ["--config", RECIPE_32B, "--vllm_server_host", "10.0.0.3"]
