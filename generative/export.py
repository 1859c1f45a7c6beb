"""Write a simulator for others: its weights alone, in half precision.

A checkpoint also holds the optimiser and tensors that only the published code asks for; without
them, and with two bytes a weight, the file is a seventh of the size. Every script reads both.

    python -m generative.export --model_file <checkpoint> --output <folder>/model.pt
"""

from __future__ import annotations

import shutil
from pathlib import Path

from common.cli import Parser
from common.errors import UserError, script_main
from common.settings import SETTINGS_NAME
from generative.published import save_compact


def parser() -> Parser:
    flags = Parser(__doc__.partition("\n")[0])
    flags.add_argument("--model_file", type=Path, required=True, help="checkpoint of a run")
    flags.add_argument("--output", type=Path, required=True, help="file to write")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    settings = args.model_file.parent / SETTINGS_NAME
    if not settings.is_file():
        raise UserError(f"there is no {settings}, without which the file's sizes are not known")
    if settings.parent.resolve() == args.output.parent.resolve():
        raise UserError(f"{args.output} would lie in the run's own folder; choose another")
    save_compact(args.output, args.model_file)
    shutil.copy(settings, args.output.parent / SETTINGS_NAME)
    print(f"wrote {args.output}, {args.output.stat().st_size / 1e6:.1f} MB, and beside it "
          f"{SETTINGS_NAME}")


if __name__ == "__main__":
    raise SystemExit(main())
