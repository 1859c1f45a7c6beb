"""Former name of the package ``attribution``; importing it prints the new command and exits."""

import sys

_RENAMED = {"attribution": "attribute"}  # scripts that were renamed with the package


def _new_command(argv: list[str]) -> str:
    """Return the current form of ``python -m clarity.SCRIPT ...``, or of an import."""
    for number, word in enumerate(argv):
        if word.startswith("clarity."):
            script = word.removeprefix("clarity.")
            return " ".join(["python -m", f"attribution.{_RENAMED.get(script, script)}",
                             *argv[number + 1:]])
    return "from attribution import run"


print(f"the package clarity is called attribution now; use: {_new_command(sys.orig_argv)}",
      file=sys.stderr)
raise SystemExit(2)
