"""Training steps of models of transformers with each attention: Tables 1 and 2 of the paper.

    python -m experiments.pretraining measure gpt2 --data data/books-tokens
    python -m experiments.pretraining measure bert-large --length 512 --padding 0.3
    python -m experiments.pretraining show results/pretraining-nvidia-h200.json

Models have random weights and the sizes of their configurations. Each attention starts from the
same weights and reads the same tokens, so losses of exact ones differ by rounding and dropout.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.cli import (
    RESULTS,
    Output,
    Overwrite,
    help_of,
    needs_extra,
    output_file,
    usage_errors,
)

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor
    from transformers import PreTrainedModel

    from experiments.language_model.books import Books

app = typer.Typer(add_completion=False, help=help_of(__doc__), rich_markup_mode=None)
# Layers, dim, heads of the configurations; the tiny ones are for tests.
GPT2 = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-tiny": (2, 32, 2)}
BERT = {"bert-large": (24, 1024, 16), "bert-tiny": (2, 32, 2)}
VOCABULARY = {"gpt2": 50_257, "bert": 30_522}
TINY = 300  # tokens of a tiny vocabulary
DENSE = ("eager", "sdpa", "ours")
ATTENTION = (*DENSE, "local(128) | butterfly() | global_tokens(64)")
LENGTHS = (512, 1024, 2048, 4096)
STEP_TOKENS = 16_384
MASKED = 0.15  # of the tokens, which BERT guesses
WARM_UP = 5  # steps that are not timed
LAST = 20  # steps whose mean loss is compared
IGNORED = -100  # a label that counts for nothing


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: Of GPT2, causal, or of BERT, which guesses masked tokens.
        attention: "eager" or "sdpa" of transformers, "ours", or a pattern as masks.parse reads it.
        seq_len: Tokens of a sequence.
        steps: Of training.
        step_tokens: Of a step, padding included.
        dropout: Of attention and of all else.
        padding: Most of a sequence that is padding; a part between 0 and this is.
        learning_rate, seed: Of AdamW; of weights, tokens and dropout.
    """

    model: str
    attention: str
    seq_len: int
    steps: int = 200
    step_tokens: int = STEP_TOKENS
    dropout: float = 0.1
    padding: float = 0.0
    learning_rate: float = 3e-4
    seed: int = 0

    def __post_init__(self):
        known = (*GPT2, *BERT)
        if self.model not in known:
            raise ValueError(f"model must be one of {', '.join(known)}, got {self.model!r}")
        if self.step_tokens % self.seq_len:
            raise ValueError(
                f"step_tokens must be a multiple of the length of {self.seq_len} tokens, got "
                f"{self.step_tokens}"
            )
        if not 0 <= self.padding < 1:
            raise ValueError(f"padding must be at least 0 and less than 1, got {self.padding}")
        if self.steps <= WARM_UP:
            raise ValueError(f"steps must be more than {WARM_UP}, got {self.steps}")

    @property
    def vocabulary(self) -> int:
        return TINY if self.model.endswith("-tiny") else VOCABULARY[self.model.partition("-")[0]]


def model_of(case: Case) -> "PreTrainedModel":
    """The model with random weights, and its attention chosen.

    Raises:
        ValueError: The attention is none.
    """
    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(case.seed)
    options: dict[str, Any] = {"vocab_size": case.vocabulary}
    if case.model in GPT2:
        layers, dim, heads = GPT2[case.model]
        rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), case.dropout)
        options |= {"n_layer": layers, "n_embd": dim, "n_head": heads} | rates
        config = GPT2Config(n_positions=case.seq_len, use_cache=False, **options)
        model = GPT2LMHeadModel(config)
    else:
        layers, dim, heads = BERT[case.model]
        names = ("attention_probs_dropout_prob", "hidden_dropout_prob")
        options |= {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": dim}
        options |= dict.fromkeys(names, case.dropout) | {"intermediate_size": 4 * dim}
        model = BertForMaskedLM(BertConfig(max_position_embeddings=case.seq_len, **options))
    attend_by(model, case.attention)
    return model


def attend_by(model: "PreTrainedModel", attention: str) -> None:
    """Chooses the attention of a model: see Case. Raises ValueError for one that is none."""
    import masks
    from sparseflash.integrations.huggingface import sparsify

    if attention in DENSE[:2]:
        model.set_attn_implementation(attention)
    else:
        sparsify(model, masks.full() if attention == "ours" else masks.parse(attention))


def batches(case: Case, books: "Books") -> Iterator[dict[str, "Tensor"]]:
    """Inputs of each step, functions of the seed and the step.

    Raises:
        ValueError: The books have more tokens than the model, or fewer than a sequence.
    """
    import numpy as np
    import torch

    content = books.splits["train"]
    # The last token of the vocabulary is the mask token.
    if len(books.token_bytes) >= case.vocabulary or len(content) < case.seq_len:
        raise ValueError(
            f"books must have fewer than {case.vocabulary} tokens in the vocabulary and "
            f"{case.seq_len} in the train split, got {len(books.token_bytes)} and {len(content)}"
        )
    shape = (case.step_tokens // case.seq_len, case.seq_len)
    for step in range(case.steps):
        random = np.random.default_rng([case.seed, step])
        begins = random.integers(len(content) - case.seq_len + 1, size=shape[0])
        found = np.stack([content[begin : begin + case.seq_len] for begin in begins])
        tokens = torch.from_numpy(found.astype(np.int64))
        filled = case.seq_len - (random.random(shape[0]) * case.padding * case.seq_len).astype(int)
        there = torch.arange(case.seq_len) < torch.from_numpy(filled)[:, None]
        counted = there
        if case.model in BERT:
            hidden = torch.from_numpy(random.random(shape) < MASKED) & there
            inputs = tokens.masked_fill(hidden, case.vocabulary - 1)
            counted = hidden
        else:
            inputs = tokens
        batch = {"input_ids": inputs, "labels": tokens.masked_fill(~counted, IGNORED)}
        yield batch | ({"attention_mask": there.long()} if case.padding else {})


def train(case: Case, books: "Books", device: str) -> dict:
    """Trains and measures; what it returns is a row of the record.

    Raises:
        ValueError: See Case, model_of and batches.
    """
    import torch

    with torch.device(device):  # weights of a large model take seconds on a CPU
        model = model_of(case)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate, weight_decay=0.1)
    on_gpu = device == "cuda"
    losses, seconds = [], []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(case.seed)  # of dropout
    for batch in batches(case, books):
        moved = {name: part.to(device) for name, part in batch.items()}
        begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = model(**moved).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(float(loss.detach()), 5))  # which waits for the device
        seconds.append(time.perf_counter() - begin)
    return asdict(case) | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_second": case.step_tokens / median(seconds[WARM_UP:]),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "losses": losses,
        "loss": fmean(losses[-LAST:]),
    }


def measure_all(
    cases: list[Case], data: Path, output: Path, device: str, show: Callable[[str], None] = print
) -> dict:
    """Writes the record after each case; cases that it holds are kept.

    Args:
        cases: What is trained, in order.
        data: What `experiments.language_model data` or `tokenize` wrote.
        output: The record.
        device: Type of it.
        show: Called with a line for each case.

    Returns:
        The record.

    Raises:
        ValueError: The record is of other books, or see `train`.
    """
    import torch

    from experiments.environment import environment
    from experiments.files import write_json
    from experiments.language_model.books import Books

    books = Books.read(data)
    record = {"data": dict(books.sha256), "rows": []}
    if output.exists():
        record = json.loads(output.read_text())
        if record["data"] != dict(books.sha256):
            raise ValueError(f"{output} is of other books than {data}: move it away first")
    facts = environment(torch.device(device))
    for case in cases:
        if any(row.items() >= asdict(case).items() for row in record["rows"]):
            continue
        try:
            row = train(case, books, device)
            told = f"{row['tokens_per_second']:,.0f} tokens/s, loss {row['loss']:.4f}"
        except torch.OutOfMemoryError:
            row = asdict(case) | {"reason": "out of memory"}
            told = row["reason"]
        torch.cuda.empty_cache()
        record["rows"].append(row | {"environment": facts})
        write_json(output, record)
        show(f"{case.model}, {case.seq_len:,} tokens, {case.attention}: {told}")
    return record


def table_of(record: dict) -> "Table":
    """Throughput, memory and loss of each row, beside those of the first of its model and size."""
    from rich.table import Table

    columns = ("model", "tokens", "attention", "dropout", "padding", "tokens/s", "speed-up")
    table = Table(*columns, "GiB", "loss", "loss difference", title="Training steps")
    first: dict[tuple, dict] = {}
    for row in record["rows"]:
        names = ("model", "seq_len", "dropout", "padding", "step_tokens", "steps", "seed")
        base = first.setdefault(tuple(row[name] for name in names), row)
        told = [row["model"], f"{row['seq_len']:,}", row["attention"]]
        told += [f"{row['dropout']:g}", f"{row['padding']:g}"]
        if "reason" in row:
            table.add_row(*told, row["reason"])
            continue
        speed, loss = row["tokens_per_second"], row["loss"]
        there = "reason" not in base
        table.add_row(
            *told,
            f"{speed:,.0f}",
            f"{speed / base['tokens_per_second']:.2f}" if there else "",
            f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "",
            f"{loss:.4f}",
            f"{loss - base['loss']:+.4f}" if there else "",
        )
    return table


def draw(record_path: Path) -> Path:
    """Draws throughput against length, and the losses of each attention at the longest that the
    first of them has, a line of pictures for each model; returns the path."""
    from experiments.pictures import COLOURS, MARKERS, panels, save

    record = json.loads(record_path.read_text())
    rows = [row for row in record["rows"] if "reason" not in row]
    models = list(dict.fromkeys(row["model"] for row in rows))
    attentions = list(dict.fromkeys(row["attention"] for row in rows))
    figure, axes = panels(len(models), 2, size=(11, 3.8 * len(models)), squeeze=False)
    for (speed, loss), model in zip(axes, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        longest = max(row["seq_len"] for row in own if row["attention"] == own[0]["attention"])
        for number, attention in enumerate(attentions):
            found = [row for row in own if row["attention"] == attention]
            look = {"color": COLOURS[number % len(COLOURS)], "label": attention}
            lengths = [row["seq_len"] for row in found]
            speeds = [row["tokens_per_second"] for row in found]
            speed.plot(lengths, speeds, marker=MARKERS[number % len(MARKERS)], **look)
            for row in found:
                if row["seq_len"] == longest:
                    loss.plot(row["losses"], linewidth=0.8, **look)
        speed.set_xscale("log", base=2)
        speed.set(
            xlabel="tokens of a sequence", ylabel="tokens a second", title=model, ylim=(0, None)
        )
        loss.set(xlabel="steps", ylabel="loss, nats", title=f"{model}, {longest:,} tokens")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    return save(figure, record_path)[0]


Attentions = Annotated[
    list[str],
    typer.Option(help="eager, sdpa, ours (sparseflash, full mask), or a pattern; repeatable."),
]


@app.command()
def measure(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join((*GPT2, *BERT))}.")],
    data: Annotated[Path, typer.Option(file_okay=False)] = Path("data/books"),
    lengths: Annotated[
        list[int], typer.Option("--length", min=16, help="Length in tokens; repeatable.")
    ] = list(LENGTHS),  # noqa: B006
    attention: Attentions = list(ATTENTION),  # noqa: B006
    steps: Annotated[
        int, typer.Option(help=f"Training steps. The first {WARM_UP} are not timed.")
    ] = 200,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = STEP_TOKENS,
    dropout: Annotated[float, typer.Option(min=0, max=0.9)] = 0.1,
    padding: Annotated[
        float, typer.Option(help="Largest share of a sequence that is padding.")
    ] = 0.0,
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Train with each attention at each length; the same command resumes an interrupted run."""
    import torch

    needs_extra("hf", "transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = output_file(output, "pretraining", device, overwrite)
    torch.set_float32_matmul_precision("high")
    with usage_errors():
        cases = [
            Case(model, each, length, steps, step_tokens, dropout, padding)
            for length in lengths
            for each in attention
        ]
        measure_all(cases, data, path, device)
    show(path)


@app.command()
def show(record: Annotated[Path, typer.Argument(exists=True, dir_okay=False)]) -> None:
    """Print the table of a record and draw its picture."""
    from experiments.report import wide_console

    wide_console().print(table_of(json.loads(record.read_text())))
    print(f"wrote {draw(record)}")


if __name__ == "__main__":
    app()
