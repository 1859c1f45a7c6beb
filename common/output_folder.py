"""Output folders that a script writes whole and replaces whole."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
from collections.abc import Iterator
from pathlib import Path

from common.description import read_description
from common.errors import UserError
from common.files import atomic_folder, remove_folder, save_json, unnamed_file, versions

SETTINGS_NAME = "settings.json"


@dataclasses.dataclass(frozen=True)
class Output:
    """A kind of folder that a script writes whole and replaces whole.

    Its settings name the kind and the files that were written. Those of an older output do
    not; it counts as of any kind that writes nothing but files of such names.

    Attributes:
        kind: what it holds and which script makes it, for the settings and for messages.
        patterns: of ``Path.glob``, of all files beside the settings.
    """

    kind: str
    patterns: tuple[str, ...] = ("*.png", "*.gif")

    def check(self, folder: Path, flag: str = "--output_dir") -> None:
        """See that this output can be written to a folder.

        Args:
            flag: that chooses it, for the message.

        Raises:
            UserError: if the folder holds anything but an earlier output of this kind.
        """
        way_out = f"choose another {flag}"
        if folder.is_symlink():
            raise UserError(f"{folder} is a link, which cannot be replaced; {way_out}")
        if not folder.exists() or not any(folder.iterdir()):
            return
        settings = read_description(folder / SETTINGS_NAME)
        if not settings:
            raise UserError(f"{folder} holds other data; {way_out}")
        kind = settings.get("made_by", self.kind).replace("clarity.", "attribution.")
        if kind != self.kind:
            raise UserError(f"{folder} holds the {kind}, not the {self.kind}; {way_out}")
        names = map(glob.escape, settings["files"]) if "files" in settings else self.patterns
        other = unnamed_file(folder, (SETTINGS_NAME, *names))
        if other:
            raise UserError(f"{other} is none of the {self.kind}, which would be replaced; move "
                            f"it elsewhere, or {way_out}")

    @contextlib.contextmanager
    def replaced(self, folder: Path, settings: dict) -> Iterator[Path]:
        """Yield a hidden folder that takes the place of an earlier output if the body succeeds.

        Args:
            settings: what the output depends on; stored with it.
        """
        with atomic_folder(folder) as temporary:
            yield temporary
            files = sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*")
                           if path.is_file())
            save_json(temporary / SETTINGS_NAME, {"made_by": self.kind, **settings,
                                                  "versions": versions(), "files": files})
            if folder.exists():
                self.check(folder)
                remove_folder(folder)
