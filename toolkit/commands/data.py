"""`toolkit data`: show what a run would train on."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from toolkit.commands.common import add_recipe_arguments, positive, read_recipe
from toolkit.launching import environment
from toolkit.recipe.sections import Recipe
from toolkit.reports.tables import plain
from toolkit.sessions.preflight import check

if TYPE_CHECKING:
    from toolkit.runtime.data.dataset import Dataset
    from toolkit.runtime.models.micro_batch import MicroBatch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_recipe_arguments(parser, nproc=False)
    parser.add_argument("--steps", type=positive, default=3, metavar="K", help="number of steps to list (default 3)")
    parser.add_argument(
        "--world", type=positive, metavar="N", help="also show which samples each of N data-parallel replicas gets"
    )
    parser.add_argument("--samples", type=int, default=2, metavar="M", help="decoded samples to show (default 2)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Load the data of a recipe and print counts, sample ids of the first steps and a few samples."""
    console = Console(stderr=args.json)
    recipe = check(read_recipe(args), environment.environment(), plain(console))
    with contextlib.redirect_stdout(sys.stderr):  # libraries print banners; standard output is for the result
        from toolkit.runtime.data.input_spec import input_spec_of
        from toolkit.runtime.data.load import load_data

        loaded = load_data(recipe, input_spec_of(recipe.model), terminal=console.file)
    steps = step_ids(recipe, loaded, args.steps, args.world)
    if args.json:
        print(json.dumps(summary(loaded) | {"steps": steps}))
        return 0
    _show(console, loaded, steps)
    for number in range(min(args.samples, len(loaded.train))):
        _show_sample(console, loaded, number)
    return 0


def summary(loaded: Dataset) -> dict[str, Any]:
    """Return the counts that `toolkit data --json` prints."""
    return {
        "documents": loaded.documents,
        "tokens": loaded.tokens,
        "useful_fraction": loaded.useful_fraction,
        "samples": len(loaded.train),
        "held_out_samples": len(loaded.held_out) if loaded.held_out is not None else 0,
        "notes": list(loaded.notes),
    }


def step_ids(recipe: Recipe, loaded: Dataset, steps: int, world: int | None) -> list[dict[str, Any]]:
    """Return the sample ids of the first steps, the same for every world size; with `world`, also by replica."""
    from toolkit.runtime.data.sample_order import PAST_END, own_share

    order = loaded.order(recipe, recipe.train.global_batch)
    last = order.batches.steps_for(order.total) if order.total is not None else recipe.train.steps
    found = []
    for step in range(min(steps, last or steps)):
        ids = order.step(step)
        entry: dict[str, Any] = {"step": step + 1, "sample_ids": [int(i) for i in ids if i != PAST_END]}
        if world:
            shares = [own_share(ids, replica=replica, replicas=world) for replica in range(world)]
            entry["replicas"] = [[int(i) for i in share if i != PAST_END] for share in shares]
        found.append(entry)
    return found


def _show(console: Console, loaded: Dataset, steps: list[dict[str, Any]]) -> None:
    numbers = summary(loaded)
    console.print(
        f"{numbers['documents']:,} documents · {numbers['tokens']:,} tokens · {numbers['samples']:,} samples · "
        f"{numbers['held_out_samples']:,} held out · {numbers['useful_fraction']:.2%} of positions useful",
        highlight=False,
        soft_wrap=True,
    )
    for note in loaded.notes:
        console.print(note, highlight=False, markup=False)
    for step in steps:
        ids = ", ".join(map(str, step["sample_ids"][:16])) + (" …" if len(step["sample_ids"]) > 16 else "")
        console.print(f"step {step['step']}: samples {ids}", highlight=False)


def _show_sample(console: Console, loaded: Dataset, number: int) -> None:
    """Print one sample as text: tokens that count in the loss are bold, the others dim."""
    import numpy as np

    from toolkit.runtime.data.groups import GroupRows
    from toolkit.runtime.models.micro_batch import IGNORE

    micro = loaded.train.batch(np.array([number]))
    if isinstance(loaded.train, GroupRows):
        _show_group(console, loaded, micro, number)
        return
    if micro.pairs is not None:
        _show_pairs(console, loaded, micro, number)
        return
    counted = micro.counted
    console.rule(f"sample {number}: {counted} of {micro.shape[-1]} predictions count")
    if micro.input_ids is None or loaded.tokenizer is None:
        console.print(f"image {tuple(micro.shape[1:])}, class {int(micro.labels[0])}", highlight=False)
        return
    if micro.labels.dim() == 1 or micro.decoder_input_ids is not None:
        tokens = (
            micro.input_ids[0][micro.attention_mask[0] == 1] if micro.attention_mask is not None else micro.input_ids
        )
        console.print(Text(loaded.tokenizer.decode(tokens.flatten().tolist())))
        target = micro.labels[0]
        shown = int(target) if target.dim() == 0 else loaded.tokenizer.decode(target[target != IGNORE].tolist())
        console.print(f"→ {shown}", highlight=False, markup=False)
        return
    console.print(_marked(loaded, micro.input_ids[0].tolist(), micro.labels[0].tolist(), IGNORE))


def _show_group(console: Console, loaded: Dataset, micro: MicroBatch, number: int) -> None:
    """Print the texts of a sample, each with the number that the data gives it."""
    assert micro.input_ids is not None
    assert micro.attention_mask is not None
    assert loaded.tokenizer is not None
    console.rule(f"sample {number}: {len(micro.input_ids)} texts")
    for place, (ids, mask) in enumerate(zip(micro.input_ids, micro.attention_mask, strict=True)):
        score = "" if micro.scores is None else f" ({float(micro.scores[0, place]):g})"
        text = loaded.tokenizer.decode(ids[mask == 1].tolist())
        console.print(f"{place + 1}{score}: {text}", highlight=False, markup=False)


def _show_pairs(console: Console, loaded: Dataset, micro: MicroBatch, number: int) -> None:
    """Print the pairs of a row: each answer after its prompt, and what counts in it."""
    from toolkit.runtime.models.micro_batch import IGNORE

    located = micro.located()
    assert located.input_ids is not None
    assert located.documents is not None
    ids, labels, documents = located.input_ids.flatten(), located.labels.flatten(), located.documents
    if documents.branches is not None:
        ids, labels = ids[documents.branches.source], labels[documents.branches.source]
        documents = documents.branches.documents
    console.rule(f"sample {number}: {len(documents.lengths) // 2} pairs, {micro.counted} predictions count")
    for place, (start, end) in enumerate(itertools.pairwise(documents.bounds.tolist())):
        own, following = ids[start:end], labels[start:end]
        pair, kind = divmod(place, 2)
        if micro.scores is None:
            name = ("chosen", "rejected")[kind]
        else:
            name = ("good" if micro.scores[pair] else "bad", "answer of another row")[kind]
        length = int((following != IGNORE).nonzero().max()) + 1  # what follows is padding
        tokens = [*own[:length].tolist(), int(following[length - 1])]
        shown = _marked(loaded, tokens, [*following[:length].tolist(), IGNORE], IGNORE)
        console.print(Text.assemble(f"{pair + 1}, {name}: ", shown))


def _marked(loaded: Dataset, ids: list[int], labels: list[int], ignored: int) -> Text:
    """Return the text with counted tokens in bold; a token counts if the loss includes its prediction."""
    assert loaded.tokenizer is not None
    flags = [False, *(label != ignored for label in labels[:-1])]
    text, start = Text(), 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or flags[end] != flags[start]:
            part = loaded.tokenizer.decode(ids[start:end])
            text.append(part, style="bold" if flags[start] else "dim")
            start = end
    return text
