# SPDX-License-Identifier: Apache-2.0
"""What ``blockpick demo`` shows to people: the question, the picked passages, and what ran and why."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .output import size_text

BAR_WIDTH = 10
HOW = {"interpreter": "interpreted, no performance figure", "reference": "torch reference, no performance figure"}
FIRST_CALL = "first call with loading, no performance figure"
VERDICTS = {
    "identical": "[bold green]oracle: identical[/]",
    "ties": "[bold green]oracle: identical up to scores that tie in fp32[/]",
    "differs": "[bold red]oracle: differs[/]",
    "not compared": "[bold red]oracle: not compared[/]: no generated kernel ran, the torch reference itself picked",
}


def report(console: Console, facts: dict[str, Any]) -> None:
    """Panel, table of picks, footer; ``facts`` is what ``--json`` writes."""
    text, queries = facts["text"], facts["queries"]
    taken = f"{text['words']:,} words"
    if text["words"] != text["words_in_file"]:
        taken = f"first {text['words']:,} of {text['words_in_file']:,} words"
    body = Text.assemble(
        (facts["question"], "bold"), "\n", (f"{text['name']}, {taken}\nqueries: {', '.join(queries)}", "dim")
    )  # fmt: skip
    console.print(Panel(body, title="blockpick demo", title_align="left", border_style="cyan"))
    console.print(pick_table(console, facts["picks"], len(queries)))
    console.print(footer(facts))
    for row in facts["oracle"]["differences"]:
        console.print(f"  query {row['query']}: picked {row['picked']}, oracle {row['oracle']}", markup=False)


def pick_table(console: Console, picks: list[dict[str, Any]], num_queries: int) -> Table:
    """One row a picked block, matched words highlighted (between asterisks where there are no colours)."""
    table = Table(expand=True, box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("block", justify="right")
    table.add_column("score", no_wrap=True)
    table.add_column("votes", justify="center")
    table.add_column("passage", ratio=1)
    for pick in picks:
        votes = f"{len(pick['votes'])}/{num_queries}"
        if pick["own"]:
            passage = Text("the question's own block, always picked (local_blocks=1)", style="dim")
            table.add_row(str(pick["block"]), "", votes, passage)
            continue
        filled = round(min(max(pick["score"], 0.0), 1.0) * BAR_WIDTH)
        bar = Text.assemble(("█" * filled, "green"), ("░" * (BAR_WIDTH - filled), "dim"), f" {pick['score']:.2f}")
        table.add_row(str(pick["block"]), bar, votes, highlight(console, pick))
    return table


def highlight(console: Console, pick: dict[str, Any]) -> Text:
    """The excerpt with its matched words marked."""
    excerpt = str(pick["excerpt"])
    if console.color_system is not None:
        text = Text(excerpt)
        for start, stop in pick["matched"]:
            text.stylize("bold yellow", start, stop)
    else:
        for start, stop in reversed(pick["matched"]):
            excerpt = f"{excerpt[:start]}*{excerpt[start:stop]}*{excerpt[stop:]}"
        text = Text(excerpt)
    return Text.assemble("… ", text, " …\n")


def footer(facts: dict[str, Any]) -> Table:
    """The cache, what ran and why, the variants, the verdict."""
    cache, run = facts["cache"], facts["run"]
    ratio = "" if cache["dtype"] == "bf16" else f", {cache['bf16_bytes'] / cache['bytes']:.1f}x smaller than bf16"
    seconds = run["seconds"]
    names = [name.replace(f"__{run['arch']}", "") for variants in run["variants"].values() for name in variants]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("", "")
    table.add_row(
        "cache",
        f"{cache['dtype']}, {cache['blocks']} blocks of 128 words, {cache['pages']} pages of "
        f"{cache['page_bytes']:,} bytes: {size_text(cache['bytes'])}{ratio}",
    )
    table.add_row("ran", f"[bold]{run['route']}[/]: {escape(run['why'])}")
    if names:
        table.add_row("kernels", escape(f"{run['arch']}: {', '.join(names)}"))
    how = HOW.get(run["route"], FIRST_CALL)
    table.add_row("took", f"insert {seconds['insert']:.1f} s, decode {seconds['decode']:.1f} s ({how})")
    table.add_row("checked", VERDICTS[facts["oracle"]["verdict"]])
    return table
