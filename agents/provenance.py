"""Compute and compare digests of the agent and the recording that a result was computed from.

An agent's digest covers its weights and edits, and does not depend on how its file is written. A
recording's digest covers the arrays and tables of all its episodes. ``recording.json`` stores the
digests of the episodes under CONTENTS: ``{number: [bytes, sha256]}``. A stored digest is trusted if
the files of the episode have this size and are older than ``recording.json``; otherwise they are
read.

Earlier versions stored checksums of agent files instead; the shipped agents list the checksums of
their earlier files under EARLIER_FILES. Recordings without digests of their episodes are identified
by their index and ``recording.json``. Both forms are still accepted.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from agents.agent_file import load_agent, weights_sha256
from common.errors import UserError
from common.files import load_tensors, sha256

CONTENTS = "contents"  # key in recording.json
EARLIER_FILES = "earlier_sha256"  # entry of an agent file: checksums of files with equal weights
_BLOCK = 1 << 20  # bytes read at a time

logger = logging.getLogger(__name__)


def agent_sha256(path: Path) -> str:
    """Return the digest of an agent's weights and edits.

    Raises:
        UserError: if the file is missing or not an agent file.
    """
    return weights_sha256(load_agent(path))


def agent_digests(path: Path) -> frozenset[str]:
    """Return the digests by which results may identify an agent, including earlier versions.

    Raises:
        UserError: if the file is missing, damaged or not an agent file.
    """
    earlier = load_tensors(path, "agent file").get(EARLIER_FILES, [])
    if not isinstance(earlier, list) or not all(isinstance(each, str) for each in earlier):
        raise UserError(f"in the agent file {path} '{EARLIER_FILES}' is no list of checksums")
    return frozenset({agent_sha256(path), sha256(path, "agent file"), *earlier})


def check_agent(found: object, agent: Path | str | None, made: str, way_out: str) -> None:
    """Check that data were created with the given agent; warn if their agent is unknown.

    Args:
        found: digest of the agent that created the data, or None.
        agent: file or digest of the agent to compare with, or None.
        made: description of the data, for messages, such as "data/ was recorded".
        way_out: advice to the user, for the message.

    Raises:
        UserError: if the data were created with another agent.
    """
    named = agent if isinstance(agent, Path) else "the one that it is used with"
    if found is None or agent is None:
        logger.warning("it is not known whether %s with this agent: there is no digest to compare",
                       made)
    elif found not in (agent_digests(agent) if isinstance(agent, Path) else {agent}):
        raise UserError(f"{made} with another agent than {named}; {way_out}")


def file_sha256(paths: Iterable[Path]) -> str:
    """Return the digest of the concatenated contents of files, read in blocks."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


class EpisodeDigests:
    """Digests of the episodes of a recording.

    Args:
        folder: folder of the recording, for messages.
        files_of: function that returns the files of an episode.
        stored: entry CONTENTS of ``recording.json``.
        stored_at: modification time of ``recording.json``, in nanoseconds.
        check_contents: read all files, instead of trusting stored digests.
    """

    def __init__(self, folder: Path, files_of: Callable[[int], list[Path]], stored: object = None,
                 stored_at: int = 0, check_contents: bool = False):
        self._folder, self._files_of = folder, files_of
        self._stored = stored if isinstance(stored, Mapping) else {}
        self._stored_at, self._check_contents = stored_at, check_contents

    def of(self, numbers: Iterable[int]) -> dict[str, list[int | str]]:
        """Return size in bytes and digest of each episode, in the format of CONTENTS.

        Episodes that differ from their stored digests are reported in a warning.
        """
        result: dict[str, list[int | str]] = {}
        changed = []
        for number in numbers:
            files, known = self._files_of(number), self._stored.get(str(number))
            stats = [path.stat() for path in files]
            size, newest = sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats)
            if (self._check_contents or not isinstance(known, list) or len(known) != 2
                    or known[0] != size or newest > self._stored_at):
                result[str(number)] = [size, file_sha256(files)]
                if known and known != result[str(number)]:
                    changed.append(number)
            else:
                result[str(number)] = known
        if changed:
            logger.warning("%s: episode%s %s changed after the recording was finished",
                           self._folder, "s" if len(changed) > 1 else "",
                           ", ".join(map(str, changed[:10])) + (" …" if changed[10:] else ""))
        return result

    @staticmethod
    def total(episodes: Mapping[str, list[int | str]]) -> str:
        """Return the digest of a recording, computed from the digests of its episodes."""
        lines = "".join(f"{number} {sha}\n" for number, (_, sha) in episodes.items())
        return hashlib.sha256(lines.encode()).hexdigest()
