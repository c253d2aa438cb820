#!/usr/bin/env bash
# The tables of experiments/results/lra-*.json; 5 minutes on one H200 with 16 cores.
set -euo pipefail
python -m experiments.lra.floors --samples 60000
python -m experiments.lra.speed
python -m experiments.lra.speed --name path --tasks path-x,path-256
python -m experiments.lra.speed --name compiled --compiled --tasks image,listops,text \
  --only standard --only flash --only 'butterfly(2)'
python -m experiments.lra.speed --name smyrf --only standard --only smyrf
