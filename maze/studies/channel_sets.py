"""Sets of channels of a layer, from the command line or as ``python -m maze.channels`` chose them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agents.layers import Layer, all_layers, find_layer
from agents.networks import Policy
from common.cli import Parser, whole
from common.errors import UserError
from common.results import ResultStore
from common.tables import read_table
from interventions.patch_text import parse_patch
from interventions.patches import Zero
from maze.level.state import GAME
from maze.studies.tracks import CHOOSING
from maze.studies.vectors import LAYER

CHANNELS_FILE = Path("analysis/maze/channels/channels.csv")  # of python -m maze.channels
NOTHING_NAME = "nothing.md"  # says that no channel was chosen


def add_channel_flags(parser: Parser) -> None:
    """Flags that choose a layer and some of its channels."""
    parser.add_argument("--layer", default=LAYER, help="layer of the channels")
    parser.add_argument("--channels", nargs="+", default=[str(CHANNELS_FILE)],
                        metavar="CHANNELS",
                        help="numbers and ranges such as 7,8,42-44, or the channels.csv of "
                             "python -m maze.channels for those of the layer that it chose")
    parser.add_argument("--strongest", type=whole(1, 10**4), metavar="N",
                        help="of a channels.csv take only the N in whose picture the cheese stands "
                             "out most")


def map_layer(policy: Policy, name: str) -> Layer:
    """A layer that has cells.

    Raises:
        UserError: if there is no such layer, or it has none.
    """
    layer = find_layer(policy, name)
    if not layer.is_map:
        maps = [each.name for each in all_layers(policy) if each.is_map]
        raise UserError(f"{layer.name} has no cells: it is {layer.shape[0]} units; take a map, "
                        f"such as {LAYER if LAYER in maps else maps[-1]}")
    return layer


def channels_asked(texts: Sequence[str], strongest: int | None, policy: Policy, layer: Layer
                   ) -> tuple[int, ...]:
    """The channels of :func:`add_channel_flags`, ascending; none if none was chosen.

    Args:
        strongest: the most of each ``channels.csv``, best contrast on the levels of the choice
            first; None for all of them.

    Raises:
        UserError: if a text is no list of channels, or the layer has no such channel.
    """
    found: set[int] = set()
    for text in texts:
        if text.endswith(".csv"):
            table = read_table(Path(text), {"set": str, "layer": str, "channel": int,
                                            "contrast": float, "chosen": bool}, ("contrast",),
                               f"python -m {GAME}.channels")
            table = table[(table["set"] == CHOOSING) & (table["layer"] == layer.name)]
            if table.empty:
                raise UserError(f"{text} has no scores of {layer.name}; name channels, or take "
                                "another --layer")
            chosen = table[table["chosen"]].sort_values("contrast", ascending=False, kind="stable")
            found |= set(chosen["channel"][:strongest])
        else:
            found |= set(parse_patch(f"zero@{layer.name}:{text}").channels)
    channels = tuple(sorted(map(int, found)))
    if channels:
        Zero(layer.name, channels=channels).select(policy, layer)  # refuses one that is not there
    return channels


def write_nothing_chosen(store: ResultStore, layer: Layer) -> None:
    """Write all that a study says which had no channels to look at."""
    text = f"No channel of {layer.name} was chosen as following the cheese, so none was looked at."
    store.write("nothing", value=text + "\n")
    print(text)
