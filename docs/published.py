"""What the FlashAttention paper publishes of time and memory over lengths, and its tables."""

from collections.abc import Iterable

from records import NOTHING, paragraphs

from experiments.markdown import table
from experiments.record import Line

LENGTHS = tuple(2**n for n in range(7, 17))
FLASH, SPARSE = "FlashAttention", "block-sparse FlashAttention"
# Milliseconds of both passes at LENGTHS, until memory is exhausted: Tables 20, 17, 14 and 11 of
# the paper. Its rows of OpenAI's kernels, Longformer and BigBird are measured without padding.
PLAIN = {
    "PyTorch": (0.67, 0.70, 1.18, 3.67, 13.22, 50.44),
    "Megatron": (0.74, 0.65, 1.23, 3.80, 13.21),
    FLASH: (0.31, 0.31, 0.73, 2.29, 7.64, 30.09, 118.50, 470.51, 1876.08, 7492.85),
    SPARSE: (0.74, 0.77, 0.82, 0.88, 1.71, 3.21, 6.56, 12.60, 24.93, 50.39),
    "Linformer": (1.31, 1.25, 1.30, 1.29, 3.20, 6.10, 11.93, 23.39, 46.72, 100.52),
    "Reformer": (3.93, 7.01, 13.15, 25.89, 52.09, 105.00, 215.13),
    "SMYRF": (2.98, 4.23, 7.78, 15.12, 29.96, 59.45, 118.60, 237.02),
    "local": (1.09, 1.27, 1.99, 5.38, 18.32, 36.77, 73.67, 147.29, 296.35),
    "LSformer": (3.03, 3.05, 4.26, 10.70, 30.77, 60.15, 118.33, 234.94),
    "block-sparse, OpenAI": (2.39, 2.40, 3.31, 5.02, 12.25, 35.94),
    "Longformer": (2.36, 2.34, 2.38, 2.94, 9.83, 21.35, 58.12),
    "BigBird": (2.35, 2.35, 2.37, 3.25, 10.36, 22.57, 60.63),
}
DROPOUT = {
    "PyTorch": (0.66, 0.67, 1.43, 4.82, 17.47, 67.29),
    "Megatron": (0.88, 0.90, 1.49, 4.73, 17.41),
    FLASH: (0.35, 0.36, 0.80, 2.52, 9.16, 36.70, 146.13, 583.45, 2332.01, 9323.63),
    SPARSE: (0.91, 0.83, 0.94, 0.92, 1.83, 3.50, 7.02, 13.56, 26.71, 53.92),
    "Linformer": (1.31, 1.21, 1.30, 1.39, 3.73, 7.15, 14.05, 27.69, 55.00),
    "Reformer": (4.06, 7.28, 13.68, 26.98, 54.27, 109.39, 223.80),
    "SMYRF": (3.00, 4.37, 8.05, 15.66, 31.04, 61.64, 123.04, 245.65),
    "local": (1.09, 1.40, 1.99, 5.61, 19.23, 38.62, 77.30, 154.63, 311.12),
    "LSformer": (3.07, 3.17, 4.31, 10.89, 31.54, 61.78, 121.56, 240.94),
    "block-sparse, OpenAI": (2.54, 2.52, 3.71, 5.44, 13.29, 39.19),
    "Longformer": (2.47, 2.49, 2.51, 3.10, 10.39, 22.49, 60.44),
    "BigBird": (2.51, 2.49, 2.52, 3.40, 10.97, 23.89, 63.28),
}
PADDING = {
    "PyTorch": (0.80, 0.81, 2.08, 7.23, 27.51, 107.58),
    "Megatron": (0.81, 0.83, 1.09, 3.36, 12.39),
    FLASH: (0.32, 0.30, 0.83, 2.37, 7.95, 30.77, 119.98, 473.65, 1883.43, 7513.01),
    SPARSE: (0.34, 0.34, 0.36, 0.69, 1.85, 3.89, 7.16, 14.85, 30.46, 60.03),
    "Linformer": (1.51, 1.42, 1.56, 1.67, 3.67, 6.99, 13.63, 26.77, 53.36, 117.56),
    "Reformer": (4.16, 7.46, 14.06, 27.68, 55.66, 112.15, 229.37),
    "SMYRF": (3.38, 4.93, 9.07, 17.66, 34.94, 69.55, 138.72, 277.41),
    "local": (1.39, 1.68, 2.08, 5.83, 20.04, 40.16, 80.44, 161.35, 325.11),
    "LSformer": (3.08, 3.10, 4.26, 10.90, 31.59, 61.72, 121.51, 241.18),
    "block-sparse, OpenAI": (2.39, 2.40, 3.31, 5.02, 12.25, 35.94),
    "Longformer": (2.36, 2.34, 2.38, 2.94, 9.83, 21.35, 58.12),
    "BigBird": (2.35, 2.35, 2.37, 3.25, 10.36, 22.57, 60.63),
}
BOTH = {
    "PyTorch": (0.84, 0.86, 2.35, 8.29, 31.75, 124.19),
    "Megatron": (0.87, 0.89, 1.33, 4.21, 16.50),
    FLASH: (0.43, 0.41, 0.95, 2.55, 9.56, 37.49, 147.75, 586.61, 2339.11, 9341.30),
    SPARSE: (0.44, 0.44, 0.45, 0.89, 1.95, 4.12, 7.64, 16.60, 32.73, 64.11),
    "Linformer": (1.57, 1.49, 1.55, 1.60, 4.19, 8.04, 15.71, 30.92, 61.47),
    "Reformer": (4.30, 7.76, 14.60, 28.74, 57.79, 116.34, 237.57),
    "SMYRF": (3.41, 5.08, 9.35, 18.18, 36.03, 71.68, 143.04, 285.87),
    "local": (1.40, 1.60, 2.06, 6.06, 20.94, 42.01, 84.08, 168.48, 339.45),
    "LSformer": (3.08, 3.10, 4.26, 10.90, 31.59, 61.72, 121.51, 241.18),
    "block-sparse, OpenAI": (2.54, 2.52, 3.71, 5.44, 13.29, 39.19),
    "Longformer": (2.47, 2.49, 2.51, 3.10, 10.39, 22.49, 60.44),
    "BigBird": (2.51, 2.49, 2.52, 3.40, 10.97, 23.89, 63.28),
}
# MB of both passes, without dropout and mask: Table 21.
MEMORY = {
    "PyTorch": (36, 104, 336, 1184, 4416, 17_024),
    "Megatron": (36, 104, 336, 1184, 4416),
    FLASH: (22, 44, 104, 209, 418, 836, 1672, 3344, 6688, 13_376),
    SPARSE: (22, 44, 104, 209, 418, 836, 1672, 3344, 6690, 13_384),
    "Linformer": (25, 52, 114, 287, 832, 1652, 3292, 6572, 13_132, 26_252),
    "Reformer": (377, 754, 1508, 3016, 6033, 12_067, 24_134),
    "SMYRF": (217, 434, 868, 1737, 3474, 6947, 13_894, 27_788),
    "local": (53, 110, 232, 592, 1696, 3392, 6784, 13_568, 27_136),
    "LSformer": (72, 152, 333, 796, 2540, 5068, 10_125, 20_240),
    "block-sparse, OpenAI": (33, 82, 228, 408, 910, 2401),
    "Longformer": (30, 61, 124, 277, 681, 1370, 2748),
    "BigBird": (33, 66, 131, 294, 708, 1431, 2872),
}


def published_landscape() -> str:
    """The times and memory that the paper has."""
    head = ["the paper, A100; tokens", *(f"{n:,}" for n in LENGTHS)]
    parts = []
    for title, values, form in (
        ("Milliseconds, both passes, without dropout and padding (Table 20)", PLAIN, "{:,.2f}"),
        ("Milliseconds, both passes, with dropout 0.1 (Table 17)", DROPOUT, "{:,.2f}"),
        ("Milliseconds, both passes, with padding (Table 14)", PADDING, "{:,.2f}"),
        ("Milliseconds, both passes, with dropout 0.1 and padding (Table 11)", BOTH, "{:,.2f}"),
        ("MB, both passes, without dropout and padding (Table 21)", MEMORY, "{:,}"),
    ):
        rows = [row_of_figures(name, row, form) for name, row in values.items()]
        parts += [f"**{title}**", table(head, rows)]
    return paragraphs(parts)


def row_of_figures(name: str, values: Iterable[float], form: str) -> list[str]:
    """A row of the paper over LENGTHS; NOTHING at lengths that were not measured."""
    written = [form.format(value) for value in values]
    return [name, *written, *[NOTHING] * (len(LENGTHS) - len(written))]


def published_line(times: Iterable[float]) -> Line:
    return {n: (ms, 0) for n, ms in zip(LENGTHS, times, strict=False)}
