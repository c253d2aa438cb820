#!/usr/bin/env bash
# The other attentions of Table 3 under the Nystromformer protocol, on ListOps, Text, Image and Pathfinder-32 (or TASKS=text
# alone), 3 seeds each; minutes a run on one GPU. Needs `pip install -e '.[lra-baselines]'` and the data of
# `python -m experiments.lra.data imdb` and `cifar`. Further arguments go to every run.
set -euo pipefail
for task in ${TASKS:-listops text image pathfinder}; do
  given=()
  [ "$task" != pathfinder ] || given=(--data.task.class_path Pathfinder --data.task.init_args.source stored)
  folders=()
  for attention in linformer linear performer 'local(64)' reformer smyrf nystromformer 'longformer(64, 64)' 'bigbird(3, 1, 1)'; do
    folders+=("runs/$task-${attention%%(*}")
    python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "${folders[-1]}" -- --preset "nystromformer/$task" \
      "${given[@]}" --model.encoder.attention "$attention" --model.encoder.block_size 64 --data.workers 4 "$@"
  done
  python -m experiments.lra.results "$task-attentions" "${folders[@]}"
done
