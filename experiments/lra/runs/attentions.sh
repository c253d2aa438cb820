#!/usr/bin/env bash
# The other attentions of Table 3 under the Nystromformer protocol, on ListOps, Text, Image, Pathfinder-32 and Path-X (or TASKS=text
# alone), 3 seeds each; minutes a run on one GPU. Path-X has no published protocol of these: it is that of Pathfinder with a smaller
# batch and fewer steps. Needs `pip install -e '.[lra-baselines]'` and the data of `python -m experiments.lra.data imdb` and `cifar`.
# Further arguments go to every run. Stamps of images are clipped, as in the runs that these are compared with.
set -euo pipefail
for task in ${TASKS:-listops text image pathfinder path-x}; do
  preset=$task given=()
  case $task in
  pathfinder) given=(--data.task.class_path Pathfinder --data.task.init_args.source stored
    --data.task.init_args.resampling clipped) ;;
  path-x) preset=pathfinder given=(--data.task.class_path Pathfinder --data.task.init_args.side 128 \
    --data.task.init_args.resampling clipped \
    --data.task.init_args.sizes '[160000,960,4080]' --data.batch_size 32 --trainer.max_steps 15000) ;;
  esac
  folders=()
  for attention in linformer linear performer 'local(64)' reformer smyrf nystromformer 'longformer(64, 64)' 'bigbird(3, 1, 1)'; do
    folders+=("runs/$task-${attention%%(*}")
    python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "${folders[-1]}" -- --preset "nystromformer/$preset" \
      "${given[@]}" --model.encoder.attention "$attention" --model.encoder.block_size 64 --data.workers 4 "$@"
  done
  python -m experiments.lra.results "$task-attentions" "${folders[@]}"
done
