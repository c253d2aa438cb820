"""How the time of attention follows the density of its mask, on this machine.

`python -m experiments.speedup` measures the same with care: checked, alternating, recorded.
"""

import time

import torch

import masks
import sparseflash

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
TOKENS = 16_384 if CUDA else 1024
BLOCK, REPEATS = 128 if CUDA else 64, 5


def seconds(run) -> float:
    """The least of a few times, after one that compiles."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        if CUDA:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


inputs = torch.randn(3, 1, 8, TOKENS, 64, device=DEVICE, dtype=DTYPE).requires_grad_()
full = None
for density in (1.0, 0.5, 0.25, 0.125, 0.0625):
    mask = masks.random(density)(TOKENS, BLOCK, DEVICE)

    def step(mask=mask):
        sparseflash.attention(*inputs.unbind(), mask).sum().backward()

    taken = seconds(step)
    full = full or taken
    speedup, ideal = full / taken, 1 / mask.density
    print(f"density {mask.density:.4f}: {taken * 1e3:8.2f} ms, {speedup:5.1f}x of {ideal:.1f}x")
