"""Exports of the three pages for their tests; ``shared`` in conftest.py calls them once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import attribution_run
import panel_run
import pytest
import torch
from conftest import FULL, ROOT, tiny_policy

import export_panel
from agents.agent_file import save_agent
from agents.networks import ImpalaEmbedder, Policy
from maze import page as maze_page
from tools.browser import chromium

HOSTILE_NAME = ("<img src=x onerror=\"window.owned=1\"></title><script>window.owned=1</script> "
                "& 'x' \u2028")
SHIPPED = "maze_confined"
MAZE_SEEDS = 12

needs_browser = pytest.mark.skipif(chromium() is None, reason="there is no Chromium on this "
                                   "machine; apt-get install chromium")

MAZE_NAME = HOSTILE_NAME.replace("</title>", "</option>").replace(" \u2028", "")


@dataclasses.dataclass(frozen=True)
class Export:
    """An exported page.

    Attributes:
        page_file: its ``index.html``.
        run: source of the page; for the maze page, agent files by name.
    """

    page_file: Path
    run: object


def export_panel_page(folder: Path) -> Export:
    run = panel_run.write_run(folder / "run")
    assert export_panel.main(run.arguments("--output_dir", str(folder / "panel"), "--exp_name",
                                           HOSTILE_NAME)) == 0
    return Export(folder / "panel" / "index.html", run)


def export_maze_page(folder: Path) -> Export:
    """Export the maze page with two agents."""
    save_agent(folder / "small.pth", small_maze_policy())
    files = [folder / "small.pth", ROOT / "pretrained" / SHIPPED / "model.pth"]
    assert maze_page.main(["--agent_file", *map(str, files), "--name", MAZE_NAME, SHIPPED,
                           "--levels", f"0-{MAZE_SEEDS - 1}", "--output_dir",
                           str(folder / "page")]) == 0
    return Export(folder / "page" / "index.html", dict(zip((MAZE_NAME, SHIPPED), files)))


def small_maze_policy() -> Policy:
    """Return a feed-forward agent with large weights, and widths that fill no vector register."""
    torch.manual_seed(3)
    policy = Policy(ImpalaEmbedder(30, (5, 8, 11)), None)
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=1.4 / max(parameter[0].numel(), 4) ** 0.5)
    return policy.eval()


def export_attribution_page(folder: Path) -> Export:
    """Export the attribution page of a small run of fruitbot."""
    save_agent(folder / "model_0.pth", tiny_policy(channels=FULL), {})
    run = attribution_run.write_run(folder, folder / "model_0.pth")
    labels = folder / "labels.json"
    labels.write_text(json.dumps({attribution_run.LAYERS[0]: {
        "1": HOSTILE_NAME[:60], "2": "coins"}}))
    page = attribution_run.exported(run, folder / "exported" / "page", "--reward_scale", "0.5",
                                    "--labels", str(labels), "--exp_name", HOSTILE_NAME)
    return Export(page.page_file, run)
