"""Export only the weights of a simulator, in half precision.

A checkpoint also holds the optimiser's state and tensors that only the published code needs;
without them, and with two bytes per weight, the file is a seventh of the size. Every script reads
both kinds of file.

    python -m generative.export --model_file <checkpoint> --output <folder>/model.pt
"""

from __future__ import annotations

import shutil
from pathlib import Path

from common.cli import Parser, add_output_file_flag, check_output
from common.config import SETTINGS_NAME
from common.errors import UserError, script_main
from generative.published import is_compact, save_compact
from generative.runs import PROGRESS_NAME


def parser() -> Parser:
    flags = Parser(__doc__.partition("\n")[0])
    flags.add_argument("--model_file", type=Path, required=True, help="checkpoint of a run")
    add_output_file_flag(flags, required=True, help="file to write")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    settings = args.model_file.parent / SETTINGS_NAME
    if not settings.is_file():
        raise UserError(f"there is no {settings}, without which the file's sizes are not known")
    folder = args.output.parent
    exported = folder / SETTINGS_NAME
    if folder.resolve() == settings.parent.resolve() or (folder / PROGRESS_NAME).exists():
        raise UserError(f"{args.output} would lie in the folder of a run; choose another")
    if exported.exists() and exported.read_bytes() != settings.read_bytes():
        raise UserError(f"{args.output} would lie beside the {SETTINGS_NAME} of another run; "
                        "choose another folder")
    check_output(args.output, is_compact, args.overwrite)
    save_compact(args.output, args.model_file)
    if not exported.exists():
        shutil.copy(settings, exported)
    print(f"wrote {args.output}, {args.output.stat().st_size / 1e6:.1f} MB, and beside it "
          f"{SETTINGS_NAME}")


if __name__ == "__main__":
    raise SystemExit(main())
