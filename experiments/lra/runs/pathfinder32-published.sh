#!/usr/bin/env bash
# Pathfinder-32 as published (Nystromformer protocol): 160,000 stored images, learned positions, black masked, 62,400 steps of 256,
# on images by the rules of the release and on those without preferred direction; dense and block-sparse, 3 seeds each; 4 to 7
# minutes a run on one H200. It tests why labels alone fail without a curriculum. Further arguments go to every run.
# Stamps are clipped, as in the records; `--data.task.init_args.resampling release` gives those of the release.
set -euo pipefail
fit() {  # folder, attention, rules of the images
  python -m experiments.lra.seeds --seeds "${SEEDS:-3}" --output "runs/$1" -- --preset nystromformer/pathfinder \
    --data.task.class_path Pathfinder --data.task.init_args.source stored --data.task.init_args.resampling clipped \
    --model.encoder.attention "$2" --model.encoder.block_size 64 --data.workers 4 "${@:3}"
}
easier=(--data.task.init_args.distractors described --data.task.init_args.directions any)
for attention in flash 'butterfly()'; do
  fit "pathfinder32-${attention%()}" "$attention" "$@"
  fit "pathfinder32-easier-${attention%()}" "$attention" "${easier[@]}" "$@"
done
python -m experiments.lra.results pathfinder32-published runs/pathfinder32-flash runs/pathfinder32-butterfly
python -m experiments.lra.results pathfinder32-published-easier runs/pathfinder32-easier-flash runs/pathfinder32-easier-butterfly
