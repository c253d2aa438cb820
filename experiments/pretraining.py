"""Training steps of GPT-2 and BERT with each attention: Tables 1 and 2 of FlashAttention.

    python -m experiments.pretraining measure gpt2 --data data/books-tokens
    python -m experiments.pretraining measure bert-large --length 512 --padding 0.3
    python -m experiments.pretraining show results/pretraining-nvidia-h200.json

The models are those of Hugging Face transformers, with random weights. Each attention starts from
the same weights and reads the same tokens. So the losses of two exact attentions differ only by
rounding and dropout.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

import masks
from experiments.cli import (
    RESULTS,
    Output,
    Overwrite,
    help_of,
    needs_extra,
    output_file,
    output_folder,
    usage_errors,
)
from experiments.files import read_object, write_json

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor
    from transformers import PreTrainedModel

    from experiments.language_model.books import Books

app = typer.Typer(add_completion=False, help=help_of(__doc__), rich_markup_mode=None)
# (layers, dim, heads) of each configuration. The tiny ones are for tests.
GPT2 = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-tiny": (2, 32, 2)}
BERT = {"bert-large": (24, 1024, 16), "bert-tiny": (2, 32, 2)}
VOCABULARY = {"gpt2": 50_257, "bert": 30_522}
TINY = 300  # size of the vocabulary of a tiny configuration
DENSE = ("eager", "sdpa", "ours")
ATTENTION = (*DENSE, "local(128) | butterfly() | global_tokens(64)")
LENGTHS = (512, 1024, 2048, 4096)
MASKED = 0.15  # share of the tokens that are masked in a sequence of BERT
WARM_UP = 5  # first steps, which are not timed
LAST = 20  # last steps, whose mean loss is compared
IGNORED = -100  # label of a token that has no part in the loss


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        model: A key of GPT2, trained on the next token, or of BERT, trained on masked tokens.
        attention: "eager" or "sdpa" of transformers; "ours", which is sparseflash with the full
            mask; or a pattern in the notation of masks.parse.
        seq_len: Length of a sequence in tokens.
        steps: Number of training steps.
        step_tokens: Tokens of a step, padding included.
        dropout: Dropout probability of attention and of the other layers.
        padding: Largest share of a sequence that is padding. The share is drawn uniformly between
            0 and this number.
        learning_rate: Learning rate of AdamW.
        seed: Seed of weights, tokens and dropout.

    Raises:
        ValueError: An attribute has a value that is not allowed.
    """

    model: str
    attention: str
    seq_len: int
    steps: int = 200
    step_tokens: int = 16_384
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
        if self.attention not in DENSE:
            masks.parse(self.attention)  # raises ValueError

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary of the model."""
        return TINY if self.model.endswith("-tiny") else VOCABULARY[self.model.partition("-")[0]]


def build_model(case: Case) -> "PreTrainedModel":
    """The model of a case with random weights, which computes attention as the case says.

    Raises:
        ValueError: The attention is not one of those that Case names.
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
    set_attention(model, case.attention)
    return model


def set_attention(model: "PreTrainedModel", attention: str) -> None:
    """Sets how a model computes attention.

    Args:
        model: A model of transformers.
        attention: As in Case.

    Raises:
        ValueError: The attention is not one of those that Case names.
    """
    from sparseflash.integrations.huggingface import sparsify

    if attention in DENSE[:2]:
        model.set_attn_implementation(attention)
    else:
        sparsify(model, masks.full() if attention == "ours" else masks.parse(attention))


def batches(case: Case, books: "Books") -> Iterator[dict[str, "Tensor"]]:
    """The arguments of the model at each step, which depend only on the seed and the step.

    Yields:
        input_ids and labels, int64 (step_tokens / seq_len, seq_len), and with padding
        attention_mask of the same shape, 1 for tokens and 0 for padding.

    Raises:
        ValueError: The vocabulary of the books is too large for the model, or their train split
            is shorter than a sequence.
    """
    import numpy as np
    import torch

    content = books.splits["train"]
    mask_token = case.vocabulary - 1
    if len(books.token_bytes) > mask_token or len(content) < case.seq_len:
        raise ValueError(
            f"books must have at most {mask_token} tokens in the vocabulary and at least "
            f"{case.seq_len} in the train split, got {len(books.token_bytes)} and {len(content)}"
        )
    shape = rows, seq_len = case.step_tokens // case.seq_len, case.seq_len
    for step in range(case.steps):
        random = np.random.default_rng([case.seed, step])
        begins = random.integers(len(content) - seq_len + 1, size=rows)
        crops = np.stack([content[begin : begin + seq_len] for begin in begins])
        tokens = torch.from_numpy(crops.astype(np.int64))
        lengths = seq_len - (random.random(rows) * case.padding * seq_len).astype(int)
        is_token = torch.arange(seq_len) < torch.from_numpy(lengths)[:, None]
        inputs, in_loss = tokens, is_token
        if case.model in BERT:
            in_loss = torch.from_numpy(random.random(shape) < MASKED) & is_token
            inputs = tokens.masked_fill(in_loss, mask_token)
        batch = {"input_ids": inputs, "labels": tokens.masked_fill(~in_loss, IGNORED)}
        yield batch | ({"attention_mask": is_token.long()} if case.padding else {})


def train(case: Case, books: "Books", device: str) -> dict:
    """Trains a model and measures its throughput, memory and losses.

    Args:
        case: The training run.
        books: The tokens that it reads.
        device: "cuda" or "cpu".

    Returns:
        A row of the record: the attributes of the case and the figures.

    Raises:
        ValueError: As build_model and batches do.
    """
    import torch

    # Else a model of an earlier case that is in a reference cycle counts as memory of this one.
    gc.collect()
    with torch.device(device):  # weights of a large model take seconds on a CPU
        model = build_model(case)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate, weight_decay=0.1)
    on_gpu = device == "cuda"
    losses, seconds = [], []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(case.seed)  # of dropout
    for batch in batches(case, books):
        arguments = {name: tensor.to(device) for name, tensor in batch.items()}
        begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = model(**arguments).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(float(loss.detach()), 5))  # float() waits for the device
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
    """Trains each case that the record does not have, and writes the record after each.

    Args:
        cases: The training runs, in order.
        data: Folder that `experiments.language_model data` or `tokenize` wrote.
        output: File of the record.
        device: "cuda" or "cpu".
        show: Called with a line of text for each case.

    Returns:
        The record.

    Raises:
        ValueError: The record is of other books or of another command, or a case cannot be
            trained: see train.
    """
    import torch

    from experiments.environment import environment
    from experiments.language_model.books import Books

    books = Books.read(data)
    record = {"data": dict(books.sha256), "rows": []}
    if output.exists():
        record = read_record(output)
        if record["data"] != dict(books.sha256):
            raise ValueError(f"{output} is of other books than {data}: give the record a --name")
    measured_on = environment(torch.device(device))
    for case in cases:
        if any(row.items() >= asdict(case).items() for row in record["rows"]):
            continue
        try:
            row = train(case, books, device)
            result = f"{row['tokens_per_second']:,.0f} tokens/s, loss {row['loss']:.4f}"
        except torch.OutOfMemoryError:
            row = asdict(case) | {"reason": "out of memory"}
            result = row["reason"]
        torch.cuda.empty_cache()
        record["rows"].append(row | {"environment": measured_on})
        write_json(output, record)
        show(f"{case.model}, {case.seq_len:,} tokens, {case.attention}: {result}")
    return record


def read_record(path: Path) -> dict:
    """Reads a record that `measure` wrote.

    Raises:
        ValueError: The file is not such a record.
    """
    what = "a record of `experiments.pretraining measure`"
    record = read_object(path, what, ("data", "rows"))
    names = {field.name for field in fields(Case)}
    if not all(isinstance(row, dict) and names <= row.keys() for row in record["rows"]):
        raise ValueError(f"{path} must be {what}, whose rows have {', '.join(sorted(names))}")
    return record


def table_of(record: dict) -> "Table":
    """The throughput, memory and loss of each row.

    Speed-up and loss difference are against the first row of the same model and sizes.
    """
    from rich.table import Table

    columns = ("model", "tokens", "attention", "dropout", "padding", "tokens/s", "speed-up")
    table = Table(*columns, "GiB", "loss", "loss difference", title="Training steps")
    for row, baseline in with_baselines(record["rows"]):
        words = [row["model"], f"{row['seq_len']:,}", row["attention"]]
        words += [f"{row['dropout']:g}", f"{row['padding']:g}"]
        if "reason" in row:
            table.add_row(*words, row["reason"])
            continue
        speed, loss = row["tokens_per_second"], row["loss"]
        comparable = "reason" not in baseline
        table.add_row(
            *words,
            f"{speed:,.0f}",
            f"{speed / baseline['tokens_per_second']:.2f}" if comparable else "",
            f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "",
            f"{loss:.4f}",
            f"{loss - baseline['loss']:+.4f}" if comparable else "",
        )
    return table


# Fields of a row that all attentions of one comparison share.
SIZES = ("model", "seq_len", "dropout", "padding", "step_tokens", "steps", "seed")


def by_size(rows: Iterable[dict]) -> list[dict]:
    """The rows of a record by model, setting and length, whatever order they were measured in."""
    models = [*GPT2, *BERT]

    def size(row: dict) -> tuple:
        return models.index(row["model"]), -row["dropout"], row["padding"], row["seq_len"]

    return sorted(rows, key=size)


def with_baselines(rows: Iterable[dict]) -> Iterator[tuple[dict, dict]]:
    """Each row of a record by size, with the first row of the same model and sizes."""
    baselines: dict[tuple, dict] = {}
    for row in by_size(rows):
        yield row, baselines.setdefault(tuple(row[name] for name in SIZES), row)


def exact_pairs(rows: Iterable[dict]) -> Iterator[tuple[dict, dict]]:
    """Each two rows of a record whose attentions are exact, with the same model and sizes."""
    exact = [row for row in rows if row["attention"] in DENSE and "reason" not in row]
    for one, two in combinations(exact, 2):
        if all(one[name] == two[name] for name in SIZES):
            yield one, two


def largest_difference(one: dict, two: dict, steps: int | None = None) -> float:
    """The largest difference of the losses of two rows in their first steps, or in all."""
    pairs = zip(one["losses"][:steps], two["losses"][:steps], strict=True)
    return max(abs(a - b) for a, b in pairs)


def draw(record: dict, picture: Path) -> Path:
    """Draws the throughput and the losses of each attention.

    There is a row of panels for each model with each dropout and padding. Throughput is drawn
    against length. Losses are drawn against steps, at the greatest length of the first attention
    of the row.

    Args:
        record: The record.
        picture: Path of the picture.

    Returns:
        The path of the picture.
    """
    from experiments.pictures import COLOURS, MARKERS, panels, save

    rows = [row for row in by_size(record["rows"]) if "reason" not in row]
    groups: dict[str, list[dict]] = {}
    for row in rows:
        padding = f", padding {row['padding']:g}" if row["padding"] else ""
        groups.setdefault(f"{row['model']}, dropout {row['dropout']:g}{padding}", []).append(row)
    attentions = list(dict.fromkeys(row["attention"] for row in record["rows"]))
    figure, axes = panels(len(groups), 2, size=(11, 3.8 * len(groups)), squeeze=False)
    lines = {}  # of the legend
    for (speed, loss), (title, group) in zip(axes, groups.items(), strict=True):
        first = group[0]["attention"]
        longest = max(row["seq_len"] for row in group if row["attention"] == first)
        for number, attention in enumerate(attentions):
            of_attention = [row for row in group if row["attention"] == attention]
            style = {"color": COLOURS[number % len(COLOURS)]}
            lengths = [row["seq_len"] for row in of_attention]
            speeds = [row["tokens_per_second"] for row in of_attention]
            marker = MARKERS[number % len(MARKERS)]
            (lines[attention],) = speed.plot(lengths, speeds, marker=marker, **style)
            for row in of_attention:
                if row["seq_len"] == longest:
                    loss.plot(row["losses"], linewidth=0.8, **style)
        speed.set_xscale("log", base=2)
        top = 1.1 * max(row["tokens_per_second"] for row in group)
        speed.set(xlabel="tokens of a sequence", ylabel="tokens a second", title=title)
        speed.set_ylim(0, top)
        loss.set(xlabel="steps", ylabel="loss, nats", title=f"{title}, {longest:,} tokens")
    place = {"loc": "outside lower left", "ncols": 2, "frameon": False, "fontsize": 8}
    figure.legend(list(lines.values()), list(lines), **place)
    return save(figure, picture)[0]


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
    ] = Case.steps,
    step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = Case.step_tokens,
    dropout: Annotated[float, typer.Option(min=0, max=0.9)] = Case.dropout,
    padding: Annotated[
        float, typer.Option(help="Largest share of a sequence that is padding.")
    ] = Case.padding,
    name: Annotated[str, typer.Option(help="Added to the name of the record.")] = "",
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Train with each attention at each length; the same command resumes an interrupted run.

    A record is of one set of books. Runs on other books need another name.
    """
    import torch

    needs_extra("hf", "transformers")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stem = f"pretraining-{name}" if name else "pretraining"
    path = output_file(output, stem, device, overwrite)
    torch.set_float32_matmul_precision("high")
    with usage_errors():
        cases = [
            Case(model, each, length, steps, step_tokens, dropout, padding)
            for length in lengths
            for each in attention
        ]
        record = measure_all(cases, data, path, device)
    print_and_draw(record, path.with_suffix(".png"))


@app.command()
def show(
    record: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    output: Output = RESULTS,
    overwrite: Overwrite = False,
) -> None:
    """Print the table of a record and draw its picture."""
    with usage_errors():
        found = read_record(record)
    print_and_draw(found, output_folder(output, overwrite) / f"{record.stem}.png")


def print_and_draw(record: dict, picture: Path) -> None:
    """Prints the table of a record and draws its picture, whose path is given."""
    from experiments.report import wide_console

    wide_console().print(table_of(record))
    print(f"wrote {draw(record, picture)}")


if __name__ == "__main__":
    app()
