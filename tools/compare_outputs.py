"""Compare two output folders by content, and list the files that differ.

    python -m tools.compare_outputs <folder> <other folder>

Arrays, weights and images are compared bit for bit. Dates and the folders' paths are ignored in
CSV, JSON, YAML, Markdown, HTML and JavaScript files and in checkpoints; durations, versions and the
digest of the simulator file are ignored in CSV, JSON and YAML files and in checkpoints. The folders
logs, pipeline and report, TensorBoard files and plots of training logs are not compared. The exit
status is 1 if the folders differ.
"""

from __future__ import annotations

import argparse
import codecs
import hashlib
import json
import re
from pathlib import Path

import pandas as pd
import torch
import yaml

# Columns and entries to ignore: times, versions, and the digest of the simulator file, which
# contains a wall time.
TIMES = {"wall_time", "frames_per_second", "waiting_for_data", "seconds", "versions",
         "model_sha256"}
SKIPPED_FOLDERS = ("logs", "pipeline", "report")
DATE = re.compile(r"\d{8}_\d{6}|\d\d-\d\d-\d{4}_\d\d-\d\d-\d\d")


def digests(output: Path, moved_from: Path | None = None) -> dict[str, str]:
    """Return the digest of each compared file in an output folder; see the module docstring.

    Args:
        output: the folder.
        moved_from: former path of the folder, if parts of it were written before it was moved.

    Returns:
        Digests by relative path, in which dates are replaced with DATE.
    """
    places = [str(path) for path in (output, moved_from) if path is not None]
    result = {}
    for path in sorted(output.rglob("*")):
        relative = path.relative_to(output)
        if (path.is_file() and relative.parts[0] not in SKIPPED_FOLDERS
                and not path.name.startswith(("events.", "plot.", "plot_for_fig."))):
            result[DATE.sub("DATE", str(relative))] = _digest(path, places)
    return result


def _digest(path: Path, places: list[str]) -> str:
    """Return the digest of a file without dates, durations and the paths ``places``."""
    content = path.read_bytes()
    if path.suffix in (".pt", ".pth"):
        content = _comparable(torch.load(path, weights_only=True, map_location="cpu"))
    elif path.suffix == ".csv":
        table = pd.read_csv(path)
        content = table[[name for name in table if name not in TIMES]].to_csv().encode()
    elif path.suffix == ".json":
        content = _comparable(json.loads(content))
    elif path.suffix == ".yml":  # long lines are wrapped, so the values are compared
        content = _comparable(yaml.safe_load(content))
    elif path.suffix not in (".md", ".html", ".js"):
        return hashlib.sha256(content).hexdigest()
    is_utf16 = content.startswith(codecs.BOM_UTF16_LE)  # page data
    text = content.decode("utf-16" if is_utf16 else "utf-8")
    for place in places:
        text = text.replace(place, "OUTPUT")
    return hashlib.sha256(DATE.sub("DATE", text).encode()).hexdigest()


def _comparable(value: object) -> bytes:
    """Encode nested values as bytes, with digests in place of tensors and without times."""
    def plain(value):
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items() if key not in TIMES}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, torch.Tensor):
            content = value.flatten().view(torch.uint8).numpy().tobytes()
            return [list(value.shape), hashlib.sha256(content).hexdigest()]
        return value

    return json.dumps(plain(value), sort_keys=True).encode()


def differences(folder: Path, other: Path) -> list[str]:
    """List files that differ or exist in only one of two folders, one line per file."""
    own, expected = digests(folder), digests(other)
    lines = []
    for name in sorted({name for name, _ in own.items() ^ expected.items()}):
        what = ("differs" if name in own and name in expected
                else f"only in {folder if name in own else other}")
        lines.append(f"{what}: {name}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("other", type=Path, help="output folder to compare with")
    args = parser.parse_args()
    for path in (args.folder, args.other):
        if not path.is_dir():
            parser.error(f"there is no folder {path}")
    lines = differences(args.folder, args.other)
    print("\n".join(lines) or f"no differences in {len(digests(args.folder))} files")
    return int(bool(lines))


if __name__ == "__main__":
    raise SystemExit(main())
