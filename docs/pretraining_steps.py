"""Tables 1 and 2 on docs/paper.md: training steps of GPT-2 and BERT."""

from records import NOTHING, load_each, measured, paragraphs, picture, ratio

from experiments.markdown import table
from experiments.pretraining import exact_pairs, largest_difference, with_baselines

FIRST_STEPS = (5, 10)  # after which the losses of exact attentions are compared


def pretraining(*names: str) -> str:
    """Training steps of each model on each device, and how far exact attentions are apart."""
    records = [record for name in names for record in load_each(name)]
    return paragraphs([*map(training_steps, records), losses_apart(records)])


def training_steps(record: dict) -> str:
    """Training steps of each model, compared with the first attention at the same size."""
    lines, of_sdpa = [], {}
    for row in record["rows"]:
        if row["attention"] == "sdpa":
            of_sdpa[size_of(row), row["dropout"]] = row.get("tokens_per_second")
    for row, base in with_baselines(record["rows"]):
        line = [row["model"], f"{row['seq_len']:,}", f"`{row['attention']}`".replace("|", "\\|")]
        line += [f"{row['dropout']:g}", f"{row['padding']:g}", f"{row['steps']}"]
        if "reason" in row:
            lines.append([*line, row["reason"], "", "", "", "", ""])
            continue
        lines.append(
            [
                *line,
                f"{row['tokens_per_second']:,.0f}",
                ratio(row["tokens_per_second"], base.get("tokens_per_second")),
                ratio(row["tokens_per_second"], of_sdpa.get((size_of(row), row["dropout"]))),
                ratio(row["peak_bytes"] or 0, 2**30, "{:.1f}"),
                f"{row['loss']:.4f}",
                f"{row['loss'] - base['loss']:+.4f}" if "loss" in base else NOTHING,
            ]
        )
    head = ["model", "tokens", "attention", "dropout", "padding", "steps", "tokens/s"]
    head += ["speed-up", "over SDPA", "GiB", "loss", "loss difference"]
    named = ", other books, with padding" * record["stem"].startswith("pretraining-padding")
    title = f"**{record['rows'][0]['environment']['device']}{named}**"
    shown = picture(record["stem"], "Throughput, and losses step by step")
    sources = dict.fromkeys(map(measured, record["rows"]))  # a command measures one model
    return paragraphs([title, table(head, lines), shown, *sources])


def losses_apart(records: list[dict]) -> str:
    """Differences of exact attentions without dropout, and at the same size with dropout."""
    pairs = [pair for record in records for pair in exact_pairs(record["rows"])]
    sizes = {size_of(one) for one, _ in pairs if not one["dropout"]}
    pairs = [(one, two) for one, two in pairs if size_of(one) in sizes]
    pairs.sort(key=lambda pair: pair[0]["dropout"])
    lines = []
    for one, two in pairs:
        line = [one["environment"]["device"], one["model"], f"{one['seq_len']:,}"]
        line += [f"{one['steps']}"]
        line += [f"{one['dropout']:g}", f"`{one['attention']}`, `{two['attention']}`"]
        apart = [largest_difference(one, two, steps) for steps in (*FIRST_STEPS, None)]
        line += [f"{loss:.5f}" for loss in apart]
        lines.append([*line, f"{abs(one['loss'] - two['loss']):.4f}"])
    head = ["device", "model", "tokens", "steps", "dropout", "attentions"]
    head += [f"in steps 1 to {steps}" for steps in FIRST_STEPS]
    head += ["in any step", "loss difference"]
    title = "**Exact attentions: the largest difference of their losses in a step**"
    return paragraphs([title, table(head, lines)]) if lines else ""


def size_of(row: dict) -> tuple:
    return row["model"], row["seq_len"], row["padding"]
