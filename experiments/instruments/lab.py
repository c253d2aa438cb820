"""The time and memory of `sparseflash.lab.profile`.

    python -m experiments.instruments.lab

profiles a model that has only attention, with random queries, keys and values: by default 32
layers of 32 heads at 32,768 tokens, with 8 candidate patterns and the first-order change of a
loss. The first layer takes longer than the others: patterns are compiled, kernels too, and
the time of each pattern is measured. The table is written to lab-<device>.json.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli import RESULTS, Device, Output, Overwrite, resolve
from experiments.instruments import Log, command
from masks.commands import progress_bar

if TYPE_CHECKING:
    from torch import Tensor, nn

PATTERNS = (
    *("local(256)", "local(1024)", "local(4096)", "longformer(512, 64)"),
    *("butterfly()", "strided(16)", "random(0.0625)", "dilated(64, 16)"),
)


@dataclass(frozen=True)
class Row:
    """One profile.

    Attributes:
        layers, heads, kv_heads, tokens, head_dim: Sizes of the model and of its input.
        dtype: Dtype of the tensors.
        patterns: Number of candidates.
        loss: Whether the change of the loss was computed.
        seconds: Time of the profile.
        first_layer_seconds: Time until the first layer was done.
        layer_seconds: Mean time of each further layer, without the change of the loss.
        peak_gb: Most memory that was allocated on the device, in 10^9 bytes, with the tensors of
            the model; None on a CPU.
        scores_gb: Size of the N x N scores of a layer in this dtype, in 10^9 bytes.
    """

    layers: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: str
    patterns: int
    loss: bool
    seconds: float
    first_layer_seconds: float
    layer_seconds: float | None
    peak_gb: float | None
    scores_gb: float


def main(
    layers: Annotated[int, typer.Option(min=1)] = 32,
    heads: Annotated[int, typer.Option(min=1)] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="Heads of keys and values.")] = 8,
    seq_len: Annotated[int, typer.Option(min=16, help="Length in tokens.")] = 32_768,
    head_dim: Annotated[int, typer.Option(min=8, max=256)] = 128,
    loss: Annotated[bool, typer.Option(help="Also compute the change of a loss.")] = True,
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Measure the time and memory of a profile of a model's attention."""
    kind = resolve(Device.AUTO)
    if heads % kv_heads:
        raise typer.BadParameter(
            f"--heads must be a multiple of --kv-heads, got {heads} and {kv_heads}"
        )
    log = Log("lab", kind, output, overwrite, patterns=PATTERNS)
    row = measure(layers, heads, kv_heads, seq_len, head_dim, loss, kind)
    log.add("profile", [row], {}, complete=True)

    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    figures = {
        "seconds": lambda row: seconds(row.seconds),
        "first layer": lambda row: seconds(row.first_layer_seconds),
        "each further layer": lambda row: seconds(row.layer_seconds),
        "peak memory, GB": lambda row: "" if row.peak_gb is None else f"{row.peak_gb:.1f}",
        "N x N scores of a layer, GB": lambda row: f"{row.scores_gb:.1f}",
    }
    names = ("layers", "heads", "kv_heads", "tokens", "head_dim", "patterns", "loss")
    log.show("time of sparseflash.lab.profile", names, figures)


def measure(
    layers: int, heads: int, kv_heads: int, seq_len: int, head_dim: int, loss: bool, device: str
) -> Row:
    """Profiles the model of `random_model`; arguments as in `main`."""
    import torch

    from sparseflash import lab

    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = random_model(layers, heads, kv_heads, head_dim, dtype, device)
    ends: list[float] = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with progress_bar("profiling layers") as progress:

        def report(done: int, total: int) -> None:
            ends.append(time.perf_counter())
            progress(done, total)

        begin = time.perf_counter()
        lab.profile(
            model,
            PATTERNS,
            seq_len,
            loss=(lambda out: out) if loss else None,
            progress=report,
        )
        end = time.perf_counter()
    return Row(
        *(layers, heads, kv_heads, seq_len, head_dim, str(dtype).removeprefix("torch.")),
        patterns=len(PATTERNS),
        loss=loss,
        seconds=end - begin,
        first_layer_seconds=ends[0] - begin,
        layer_seconds=(ends[-1] - ends[0]) / (layers - 1) if layers > 1 else None,
        peak_gb=torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
        scores_gb=heads * seq_len**2 * dtype.itemsize / 1e9,
    )


def random_model(
    layers: int, heads: int, kv_heads: int, head_dim: int, dtype, device: str
) -> "nn.Module":
    """A model of causal attention alone, of which each layer draws its queries, keys and values.

    Its input is a number of tokens, and its output the mean square of all its layers' outputs.
    """
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention

    class RandomAttention(nn.Module):
        def forward(self, tokens: int) -> "Tensor":
            query, key, value = (
                torch.randn(1, n, tokens, head_dim, dtype=dtype, device=device)
                for n in (heads, kv_heads, kv_heads)
            )
            out = scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=heads != kv_heads
            )
            return out.square().mean()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(RandomAttention() for _ in range(layers))

        def forward(self, tokens: int) -> "Tensor":
            return torch.stack([layer(tokens) for layer in self.layers]).mean()

    return Model()


if __name__ == "__main__":
    command(main)
