"""Export of a simulator, see ``ExportOptions``.

A checkpoint also holds the optimiser's state and tensors that only the published code needs;
without them, and with two bytes per weight, the file is a seventh of the size. Every script reads
both kinds of file.

    python -m generative.export --model_file <checkpoint> --output <folder>/model.pt
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from common.cli import output_file
from common.config import SETTINGS_NAME
from common.options import OutputFileOptions, command, option
from generative.published import is_compact, save_compact
from generative.runs import check_export, copy_settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions(OutputFileOptions):
    """Export only the weights of a simulator, in half precision."""

    model_file: Path = option(help="checkpoint of a run")
    output: Path = option(help="file to write", type=output_file)


def export_simulator(options: ExportOptions) -> Path:
    """Export a simulator, and return its file."""
    check_export(options.model_file, options.output)
    options.check_output(is_compact)
    save_compact(options.output, options.model_file)
    copy_settings(options.model_file, options.output)
    print(f"wrote {options.output} ({options.output.stat().st_size / 1e6:.1f} MB), and "
          f"{SETTINGS_NAME} next to it")
    return options.output


main = command(ExportOptions, export_simulator)

if __name__ == "__main__":
    raise SystemExit(main())
