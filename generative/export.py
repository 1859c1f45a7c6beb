"""Export only the weights of a simulator, in half precision.

A checkpoint also holds the optimiser's state and tensors that only the published code needs;
without them, and with two bytes per weight, the file is a seventh of the size. Every script reads
both kinds of file.

    python -m generative.export --model_file <checkpoint> --output <folder>/model.pt
"""

from __future__ import annotations

from pathlib import Path

from common.cli import Parser, add_output_file_flag, check_output
from common.config import SETTINGS_NAME
from common.errors import script_main
from generative.published import is_compact, save_compact
from generative.runs import check_export, copy_settings


def parser() -> Parser:
    flags = Parser(__doc__.partition("\n")[0])
    flags.add_argument("--model_file", type=Path, required=True, help="checkpoint of a run")
    add_output_file_flag(flags, required=True, help="file to write")
    return flags


@script_main
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    check_export(args.model_file, args.output)
    check_output(args.output, is_compact, args.overwrite)
    save_compact(args.output, args.model_file)
    copy_settings(args.model_file, args.output)
    print(f"wrote {args.output} ({args.output.stat().st_size / 1e6:.1f} MB), and {SETTINGS_NAME} "
          "next to it")


if __name__ == "__main__":
    raise SystemExit(main())
