"""Public names of packages, imported on first use (PEP 562), so that scripts start quickly."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_exports(package: str, exports: Mapping[str, Sequence[str]]
                 ) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: name of the package.
        exports: public names by the module that defines them. No name may be that of a submodule,
            because Python assigns a submodule to its package when it is imported.
    """
    module_of = {name: module for module, names in exports.items() for name in names}

    def get(name: str) -> Any:
        here = sys.modules[package]
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name,
                                 obj=here)
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(here, name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *module_of})
