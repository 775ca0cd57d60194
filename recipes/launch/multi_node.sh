#!/bin/bash
# One node's part of a launch over several nodes, without a scheduler. Run it on every training node, with its own rank:
#
#   bash recipes/launch/multi_node.sh 0 10.0.0.1 recipes/qwen2.5-32b/erpo.yaml --vllm_server_host 10.0.0.3
#   bash recipes/launch/multi_node.sh 1 10.0.0.1 recipes/qwen2.5-32b/erpo.yaml --vllm_server_host 10.0.0.3
#
# 10.0.0.1 is the address of rank 0's node, as the others reach it; port 29500 must be open on it. Where the recipe sets
# `vllm_mode: server`, start the server first, on a node of its own (10.0.0.3 here):
#
#   trl vllm-serve --model Qwen/Qwen2.5-32B --tensor_parallel_size 8
#
# ACCELERATE_FILE names another accelerate file than ZeRO-3 over two nodes. Options at the end go to `erpo-trl train`.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: bash recipes/launch/multi_node.sh RANK ADDRESS_OF_RANK_0 RECIPE [options]" >&2
    exit 2
fi
rank=$1 address=$2 recipe=$3
shift 3
exec accelerate launch --config_file "${ACCELERATE_FILE:-recipes/accelerate/multi_node.yaml}" \
    --machine_rank "$rank" --main_process_ip "$address" --main_process_port 29500 \
    -m erpo_trl.cli train --config "$recipe" "$@"
