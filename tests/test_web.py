"""The pages in web/: built files match the sources, and shared modules import from no page."""

import hashlib
import json
import re

import pytest

from common.page_files import BUILT

WEB = BUILT.parent
PAGES = sorted(path.parent.name for path in WEB.glob("*/main.js"))


@pytest.mark.parametrize("page", PAGES)
def test_built_page_is_of_these_sources(page):
    """If this fails, run 'make web' and commit the built files."""
    sources = [path for name in ("package-lock.json", "package.json", page, "shared",
                                 "vite.config.js")
               for path in [WEB / name, *(WEB / name).rglob("*")] if path.is_file()]
    names = sorted(path.relative_to(WEB).as_posix() for path in sources)
    lines = [f"{name} {hashlib.sha256((WEB / name).read_bytes()).hexdigest()}\n" for name in names]
    checksum = hashlib.sha256("".join(lines).encode()).hexdigest()
    built = WEB / "built" / page
    assert (built / f"{page}.js").read_text().startswith(f"/* built from sources {checksum} */")
    assert (built / "index.html").read_bytes() == (WEB / page / "index.html").read_bytes()


@pytest.mark.parametrize("page", [*PAGES, "shared"])
def test_a_page_imports_from_itself_and_from_what_is_shared_alone(page):
    """Therefore, a shared module imports nothing from a page."""
    folder, found = WEB / page, 0
    for path in [*folder.rglob("*.js"), *folder.rglob("*.svelte")]:
        for imported in re.findall(r"""(?:from|import)\s*\(?\s*['"](\.[^'"]*)['"]""",
                                   path.read_text()):
            # A query specifies how a file is embedded: as a worker or as WebAssembly.
            target = (path.parent / imported.partition("?")[0]).resolve()
            assert target.is_file(), f"{path.relative_to(WEB)} imports {imported}"
            assert target.relative_to(WEB).parts[0] in (page, "shared"), \
                f"{path.relative_to(WEB)} imports {imported}"
            found += 1
    assert found


def test_no_package_is_pinned_to_a_machines_registry():
    lock = json.loads((WEB / "package-lock.json").read_text())
    assert len(lock["packages"]) > 3
    assert not [each for each in lock["packages"].values() if "resolved" in each]
    wanted = json.loads((WEB / "package.json").read_text())["devDependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
