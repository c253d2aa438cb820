"""A module in two processes: replicated (DDP) and sharded (FSDP2)."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from sparseflash.nn import SparseEncoderLayer

PROCESSES = 2


def step(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """One step of gradient descent on the mean over the batch."""
    model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model


def process(rank: int, device: str, store: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    layer = SparseEncoderLayer(32, 4, 48, dropout=0.0, pattern="local(7) & causal()").to(device)
    batch = torch.randn(2 * PROCESSES, 50, 32).to(device)
    expected = step(copy.deepcopy(layer), batch)
    own = batch[rank::PROCESSES]
    replicated = dict(step(DistributedDataParallel(copy.deepcopy(layer)), own).named_parameters())
    mesh = init_device_mesh(device, (PROCESSES,))
    sharded = step(fully_shard(copy.deepcopy(layer), mesh=mesh), own)
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(replicated[f"module.{name}"], weight)
        shards = sharded.get_parameter(name)
        assert isinstance(shards, DTensor)
        torch.testing.assert_close(shards.full_tensor(), weight)
    dist.destroy_process_group()


@pytest.mark.slow(20)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_processes_step_like_one(device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < PROCESSES:
        pytest.skip(f"needs {PROCESSES} CUDA devices")
    spawn(process, (device, str(tmp_path / "store")), nprocs=PROCESSES)
