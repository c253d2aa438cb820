"""`python -m sparseflash profile`: patterns for a model of transformers, from the command line."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from masks.commands import Json, progress_bar, usage_errors


def profile_command(
    model: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, help="Folder of a causal language model."),
    ],
    text: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="Text file that the model reads.")
    ],
    pattern: Annotated[list[str], typer.Option(help="A candidate; repeatable.")],
    tokens: Annotated[int, typer.Option(min=16, help="Number of tokens that are read.")] = 4096,
    budget: Annotated[
        float | None,
        typer.Option(help="Suggest patterns for this share of the time of dense attention."),
    ] = None,
    by: Annotated[
        Literal["recall", "error", "loss"], typer.Option(help="What the suggestion optimises.")
    ] = "recall",
    loss: Annotated[
        bool, typer.Option(help="Also measure the change of the loss, which needs more memory.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="JSON file for the suggestion.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Picture to write (PNG, SVG or PDF).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the attention mass that patterns keep in each head of a model."""
    import torch

    with usage_errors("profile needs `pip install -e '.[hf]'`", (ModuleNotFoundError,)):
        from transformers import AutoModelForCausalLM, AutoTokenizer  # they take long to import

    from masks.plot import check_picture
    from sparseflash.lab.profiler import profile
    from sparseflash.lab.suggestion import suggest

    if output is not None and budget is None:
        raise typer.BadParameter("--output needs --budget")
    if budget is not None and not 0 < budget <= 1:
        raise typer.BadParameter(f"--budget must be above 0 and at most 1, got {budget}")
    if by == "loss" and not loss:
        raise typer.BadParameter("--by loss needs --loss")
    with usage_errors():
        check_picture("--plot", plot)
        with usage_errors("model must be a folder with a tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[:, :tokens].to(device)
        if ids.shape[1] < tokens:
            raise ValueError(f"--text must have {tokens} tokens (--tokens), got {ids.shape[1]}")
        inputs = {"input_ids": ids, "use_cache": False} | ({"labels": ids} if loss else {})
        with progress_bar("profiling layers") as progress:
            found = profile(loaded.to(device), pattern, inputs, progress=progress)  # type: ignore
        if plot is not None:
            found.plot(plot)
        if not as_json:
            print(found)  # before `suggest`, which raises an error if no pattern fits the budget
        suggestion = None if budget is None else suggest(found, budget, by=by)
        if suggestion is not None and output is not None:
            suggestion.save(output)
    chosen = None if suggestion is None else suggestion.to_dict()
    if as_json:
        print(json.dumps({"profile": found.to_dict(), "suggestion": chosen}))
        return
    if suggestion is not None:
        print(f"\nwithin {budget:g} of the time: recall {suggestion.recall:.4f}")
        for layer, heads in enumerate(suggestion.layers):
            counts = {text: heads.count(text) for text in dict.fromkeys(heads)}
            print(f"layer {layer}: {', '.join(f'{n} x {text}' for text, n in counts.items())}")
    for path in filter(None, (output, plot)):
        print(f"wrote {path}")
