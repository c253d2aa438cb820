"""A sequence that several processes share: each has its tokens and fetches only what they attend.

    torchrun --nproc-per-node 2 examples/long_sequence.py

Each process has a GPU if the host has enough of them; otherwise all run on CPUs. Run as an
ordinary script it is one process, which has all tokens and fetches nothing.
"""

import os

import torch
import torch.distributed as dist

import masks
from sparseflash.distributed import Copies, context_parallel_attention, gather, make_plan

TOKENS, HEADS, KV_HEADS, DIM = 4096, 4, 2, 32

device = torch.device("cpu")
if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
if "RANK" in os.environ:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

mask = ((masks.local(256) | masks.global_tokens([0])) & masks.causal())(TOKENS, block_size=64)
plan = make_plan(mask, ranks)  # every rank makes the same one
copies = Copies.where_possible(device=device)  # if all ranks are GPUs of this host
if rank == 0:
    print(plan.report(KV_HEADS, DIM, torch.float32))

torch.manual_seed(0)  # here every rank makes the whole sequence, and takes its tokens of it
whole = [torch.randn(1, n, TOKENS, DIM, device=device) for n in (HEADS, KV_HEADS, KV_HEADS)]
query, key, value = (plan.shard(x, rank, dim=2).requires_grad_() for x in whole)
out = context_parallel_attention(query, key, value, plan, transport=copies)
out.square().sum().backward()
everything = gather(out.detach(), plan, dim=2)
print(f"rank {rank}: tokens {plan.positions(rank)[:3].tolist()}..., of {everything.shape[2]}")
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
