"""Recall, error and time of candidate patterns for every layer and head of a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import masks
from masks import Pattern, plot
from masks._parse import as_pattern
from masks.progress import Progress
from sparseflash.lab.capture import AttentionCall, attention_modules, captured, run, within
from sparseflash.timing import median_ms

SECONDS = 0.2  # of measurement for each pattern


@dataclass(frozen=True)
class Profile:
    """Recall, error and time of each pattern. Pattern 0 is the model's own mask.

    Attributes:
        seq_len: Length of the sequence, in tokens.
        layers: Name of the module of each layer, in the order of the calls.
        patterns: The model's own pattern, then the candidates as they were given.
        density: float64 (patterns,), density of each pattern within the model's own mask.
        recall: float64 (layers, heads, patterns), share of the attention mass of a query that is
            in the pattern, averaged over queries.
        error: float64 (layers, heads, patterns), ||O_pattern - O|| / ||O||.
        loss: float64 (layers, heads, patterns), first-order change of the loss if this head alone
            attends by the pattern: the sum of dL/dO (O_pattern - O). None without a loss.
        measured_ms: float64 (patterns,), rested time of the forward pass of one layer.
        predicted_ms: float64 (patterns,), measured time of the model's own mask, times the ratio
            of the densities.
    """

    seq_len: int
    layers: tuple[str, ...]
    patterns: tuple[str, ...]
    density: Tensor
    recall: Tensor
    error: Tensor
    loss: Tensor | None
    measured_ms: Tensor
    predicted_ms: Tensor

    def ranked(self) -> list[dict[str, Any]]:
        """One row for each pattern, highest mean recall first."""
        rows = []
        for p, pattern in enumerate(self.patterns):
            recall = self.recall[..., p]
            worst = divmod(int(recall.argmin()), recall.shape[1])
            rows.append(
                {
                    "pattern": pattern,
                    "density": float(self.density[p]),
                    "measured_ms": float(self.measured_ms[p]),
                    "predicted_ms": float(self.predicted_ms[p]),
                    "recall": float(recall.mean()),
                    "least_recall": float(recall.min()),
                    "worst_layer_head": list(worst),
                    "error": float(self.error[..., p].mean()),
                    "loss": None if self.loss is None else float(self.loss[..., p].sum()),
                    "pareto": self._is_on_pareto_front(p),
                }
            )
        return sorted(rows, key=lambda row: -row["recall"])

    def _is_on_pareto_front(self, p: int) -> bool:
        """Whether no faster pattern has at least the same mean recall."""
        recall = self.recall.mean((0, 1))
        return not bool(((self.measured_ms < self.measured_ms[p]) & (recall >= recall[p])).any())

    def to_dict(self) -> dict[str, Any]:
        """All fields as values that JSON can store."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in values.items()}

    def plot(self, path: str | Path) -> None:
        """Writes a picture (PNG, SVG or PDF): lost attention mass against time.

        A mark is the mean over heads. Its bar extends from the 10 % to the 90 % quantile of the
        heads. The line is the result of `suggest`, which selects a pattern for each head.

        Args:
            path: The file; its suffix selects the format.

        Raises:
            ValueError: The suffix of `path` is another one, or its folder does not exist.
            OSError: The file cannot be written.
        """
        plot.check_picture("path", Path(path))
        from matplotlib.figure import Figure  # it takes long to import

        from sparseflash.lab.suggestion import suggest

        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        lost = 1 - self.recall.flatten(0, 1)
        for p, pattern in enumerate(self.patterns):
            low, high = torch.quantile(lost[:, p], torch.tensor([0.1, 0.9], dtype=lost.dtype))
            time, mean = float(self.measured_ms[p]), float(lost[:, p].mean())
            axes.vlines(time, float(low), float(high), color="#7f7f7f")
            axes.plot(time, mean, "o", color="#0072b2")
            axes.annotate(pattern, (time, mean), (4, 4), textcoords="offset points", fontsize=7)
        axes.margins(x=0.15)
        least, most = float(self.measured_ms.min()), float(self.measured_ms[0])
        shares = [least / most + (1 - least / most) * i / 32 for i in range(33)]
        chosen = [suggest(self, min(share, 1.0)) for share in shares]
        axes.plot(
            [s.time_share * most for s in chosen],
            [1 - s.recall for s in chosen],
            color="#d55e00",
            label="a pattern of its own for each head",
        )
        axes.set(
            xlabel="forward time of a layer (ms)", ylabel="attention mass lost", ylim=(0, None)
        )
        axes.legend()
        figure.savefig(path, dpi=150)

    def __str__(self) -> str:
        lines = [
            f"{'recall':>8} {'least':>8} {'error':>8} {'loss':>9} {'density':>8} "
            f"{'ms':>9} {'predicted':>9}  pattern (* on the Pareto front)"
        ]
        for row in self.ranked():
            loss = "-" if row["loss"] is None else f"{row['loss']:+.4f}"
            lines.append(
                f"{row['recall']:8.4f} {row['least_recall']:8.4f} {row['error']:8.4f} {loss:>9} "
                f"{row['density']:8.4f} {row['measured_ms']:9.3f} {row['predicted_ms']:9.3f}  "
                f"{row['pattern']}{' *' * row['pareto']}"
            )
        return "\n".join(lines)


def profile(
    source: nn.Module | Sequence[tuple[Tensor, Tensor, Tensor]],
    patterns: Sequence[Pattern | str],
    inputs: Any = None,
    *,
    causal: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measures recall, error and time of patterns for every layer and head of a model.

    recall(q) = sum of P[q, k] over k in the pattern = exp(LSE_pattern(q) - LSE(q))

    The model runs once. In each layer attention runs once with the model's own mask and once with
    each pattern. Without a loss only the tensors of the current layer are held. With a loss those
    of all layers are held, and attention with the patterns runs again after the backward pass.

    Args:
        source: A model that calls torch's scaled_dot_product_attention (transformers with "sdpa")
            or has modules sparseflash.nn.SparseAttention. Or (query, key, value) of each layer,
            each (batch, heads, tokens, head_dim), as in sparseflash.attention.
        patterns: Candidates, as Patterns or texts. Each is intersected with the model's own mask.
        inputs: Arguments of the model: a mapping of keyword arguments, or its first argument. All
            sequences have one length, without padding.
        causal: Whether given tensors attend causally. Ignored for a model.
        loss: A function of the model's output. By default the attribute `loss` of the output,
            which transformers sets if inputs have labels.
        progress: Called with (layers done, layers) after each layer.

    Returns:
        The profile, on the CPU.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no pattern or no layer; layers differ in heads, tokens or mask; or the
            model's attention cannot be captured, and the message names the module.

    Reference:
        Jiang et al., "MInference 1.0", 2024 (attention mass).
    """
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise TypeError(f"patterns must be a list of patterns, got {patterns!r}")
    if not patterns:
        raise ValueError("patterns must have at least 1 entry, got none")
    profiler = _Profiler(patterns, progress)
    if isinstance(source, nn.Module):
        profiler.expected = len(attention_modules(source))
        profiler.with_loss = loss is not None or (
            isinstance(inputs, Mapping) and "labels" in inputs
        )
        with torch.set_grad_enabled(profiler.with_loss):
            with captured(source, profiler.add_layer):
                value = run(source, inputs, loss)
            if not profiler.layers:
                raise ValueError(_error_without_calls(source))
            profiler.differentiate(value)
    else:
        profiler.expected = len(_checked_layers(source))
        own = masks.causal() if causal else masks.full()
        with torch.no_grad():
            for i, tensors in enumerate(source):
                profiler.add_layer(AttentionCall(f"layer {i}", *tensors, own, {}))
    return profiler.result()


def _checked_layers(source: Any) -> Sequence[Sequence[Tensor]]:
    """Raises TypeError unless it is a list of (query, key, value)."""
    if not isinstance(source, Sequence):
        raise TypeError(
            f"source must be a model or a list of (query, key, value), got {type(source).__name__}"
        )
    for i, layer in enumerate(source):
        if not isinstance(layer, Sequence) or len(layer) != 3:
            got = len(layer) if isinstance(layer, Sequence) else type(layer).__name__
            raise TypeError(f"source[{i}] must be (query, key, value), got {got}")
    return source


def _error_without_calls(model: nn.Module) -> str:
    """The message for a model that made no call of attention."""
    modules = ", ".join(attention_modules(model))
    return (
        f"{type(model).__name__} cannot be hooked: it calls neither torch's "
        "scaled_dot_product_attention nor sparseflash's attention; "
        + (
            f"modules that are named after attention but did not run: {modules}"
            if modules
            else "no module of it is named after attention"
        )
    )


class _Profiler:
    """Collects recall, error and loss of one layer after another."""

    def __init__(self, patterns: Sequence[Pattern | str], progress: Progress | None):
        self.patterns = [as_pattern(p) for p in patterns]
        self.texts = [p if isinstance(p, str) else p.name for p in patterns]
        self.progress, self.expected, self.with_loss = progress, 0, False
        self.first: AttentionCall | None = None
        self.layers: list[str] = []
        self.rows: list[tuple[Tensor, Tensor]] = []  # recall and error of each layer
        self.outputs: list[tuple[AttentionCall, Tensor]] = []
        self.times: list[float] = []
        self.density: list[float] = []
        self.loss: Tensor | None = None

    def add_layer(self, call: AttentionCall) -> Tensor:
        """Adds a layer. Returns its output with the model's own mask."""
        own = call.attend(call.base)
        if not own[0].requires_grad and self.with_loss:
            own[0].requires_grad_()
        if self.first is None:
            self.first = call
            self._measure(call)
        self._check(call, self.first)
        self.layers.append(call.module)
        with torch.no_grad():
            self.rows.append(self._compare(call, *own))
        if self.with_loss:
            self.outputs.append((call, own[0]))
        if self.progress is not None:
            self.progress(len(self.layers), max(self.expected, len(self.layers)))
        return own[0]

    def differentiate(self, value: Tensor | None) -> None:
        """Computes the first-order change of the loss for every layer, head and pattern."""
        if value is None or not self.outputs:
            return
        grads = torch.autograd.grad(value, [out for _, out in self.outputs])
        with torch.no_grad():
            losses = []
            for (call, out), grad in zip(self.outputs, grads, strict=True):
                change = [torch.zeros(out.shape[1], dtype=torch.float64)]
                for pattern in self.patterns:
                    difference = call.attend(within(pattern, call.base))[0] - out
                    change.append(_head_sums(_upcast(grad) * _upcast(difference)).cpu())
                losses.append(torch.stack(change, dim=1))
            self.loss = torch.stack(losses)

    def result(self) -> Profile:
        """The profile of the layers that were added."""
        if self.first is None:
            raise ValueError("source must have at least 1 layer of attention, got none")
        recall, error = (torch.stack(values) for values in zip(*self.rows, strict=True))
        density = torch.tensor(self.density, dtype=torch.float64)
        times = torch.tensor(self.times, dtype=torch.float64)
        return Profile(
            seq_len=self.first.query.shape[2],
            layers=tuple(self.layers),
            patterns=(self.first.base.name, *self.texts),
            density=density,
            recall=recall,
            error=error,
            loss=self.loss,
            measured_ms=times,
            predicted_ms=times[0] * density / density[0],
        )

    def _compare(self, call: AttentionCall, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """(recall, error), each (heads, patterns); 1 and 0 for the model's own mask."""
        heads = out.shape[1]
        recalls = [torch.ones(heads, dtype=torch.float64)]
        errors = [torch.zeros(heads, dtype=torch.float64)]
        norm = _head_sums(_upcast(out).square())
        for pattern in self.patterns:
            sparse, sparse_lse = call.attend(within(pattern, call.base))
            # Rounding of the two LSEs may give more than 1.
            mass = (sparse_lse - lse).exp().nan_to_num(0.0).clamp(max=1)
            recalls.append(mass.double().mean((0, 2)).cpu())
            difference = _head_sums((_upcast(sparse) - _upcast(out)).square())
            errors.append((difference / norm.clamp(min=1e-300)).sqrt().cpu())
        return torch.stack(recalls, dim=1), torch.stack(errors, dim=1)

    def _measure(self, call: AttentionCall) -> None:
        runs = {}
        for pattern in [call.base, *(within(p, call.base) for p in self.patterns)]:
            mask = pattern(call.query.shape[2], device=call.query.device)
            self.density.append(mask.density)
            runs[str(len(runs))] = partial(call.attend, mask)
        with torch.no_grad():
            times = median_ms(runs, call.query.device, SECONDS * len(runs))
        self.times += times.values()

    def _check(self, call: AttentionCall, first: AttentionCall) -> None:
        sizes, first_sizes = (
            (c.query.shape[1], c.query.shape[2], c.base.name) for c in (call, first)
        )
        if sizes != first_sizes:
            raise ValueError(
                f"layers must share heads, tokens and mask, got {sizes} in {call.module} beside "
                f"{first_sizes} in {first.module}"
            )


def _head_sums(values: Tensor) -> Tensor:
    """The sum of (batch, heads, tokens, head_dim) over all but heads: float64 (heads,)."""
    return values.sum((0, 2, 3), dtype=torch.float64)


def _upcast(values: Tensor) -> Tensor:
    """The values in float32, or in float64 if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
