#!/usr/bin/env bash
# ListOps under the Nystromformer protocol: dense and block-sparse, 3 seeds each; 1 to 2 minutes a run on one H200.
set -euo pipefail
for attention in flash 'butterfly()'; do
  python -m experiments.lra.seeds --seeds 3 --output "runs/listops-${attention%()}" -- \
    --preset nystromformer/listops --model.encoder.attention "$attention" --data.workers 4
done
# A larger model for longer.
python -m experiments.lra.seeds --seeds 1 --output runs/listops-large -- \
  --preset tay/listops --trainer.max_steps 30000 --data.batch_size 64 --data.workers 8 \
  --model.encoder.attention 'local(64) | global_tokens(64)' --model.encoder.attention_dropout 0 \
  --model.encoder.positions rotary --model.passes compiled --model.optimizer.schedule cosine \
  --model.optimizer.learning_rate 3e-4
