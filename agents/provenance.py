"""Compute and compare digests of the agent and the recording that a result was computed from.

An agent's digest covers its weights and edits, and does not depend on how its file is written. A
recording's digest covers the arrays and tables of all its episodes. ``recording.json`` stores the
digests of the episodes under CONTENTS: ``{number: [bytes, sha256]}``. A stored digest is trusted if
the files of the episode have this total size and are not newer than ``recording.json``; otherwise
they are read.

Earlier versions stored checksums of agent files instead; the shipped agents list the checksums of
their earlier files under EARLIER_FILES. Recordings without digests of their episodes are identified
by their index and ``recording.json``. Both forms are still accepted.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

from agents.agent_file import load_agent, weights_sha256
from common.errors import UserError
from common.files import load_tensors, sha256

CONTENTS = "contents"  # key in recording.json
EARLIER_FILES = "earlier_sha256"  # entry of an agent file: checksums of files with equal weights

logger = logging.getLogger(__name__)


def agent_sha256(path: Path) -> str:
    """Return the digest of an agent's weights and edits.

    Raises:
        UserError: if the file is missing or not an agent file.
    """
    return weights_sha256(load_agent(path))


def agent_digests(path: Path) -> frozenset[str]:
    """Return the digest of an agent, and the checksums of its file and of earlier files with the
    same weights; results may identify the agent by any of them.

    Raises:
        UserError: if the file is missing, damaged or not an agent file.
    """
    earlier = load_tensors(path, "agent file").get(EARLIER_FILES, [])
    if not isinstance(earlier, list) or not all(isinstance(item, str) for item in earlier):
        raise UserError(f"in the agent file {path} '{EARLIER_FILES}' is not a list of checksums")
    return frozenset({agent_sha256(path), sha256(path, "agent file"), *earlier})


def check_agent(found: object, agent: Path | str | None, made: str, way_out: str) -> None:
    """Check that data were created with the given agent; warn if either digest is missing.

    Args:
        found: digest of the agent that created the data, or None.
        agent: file or digest of the agent to compare with, or None.
        made: description of the data, for messages, such as "data/ was recorded".
        way_out: advice to the user, for the message.

    Raises:
        UserError: if the data were created with another agent.
    """
    name = agent if isinstance(agent, Path) else "the one that it is used with"
    if found is None or agent is None:
        logger.warning("it is not known whether %s with this agent: there is no digest to compare",
                       made)
    elif found not in (agent_digests(agent) if isinstance(agent, Path) else {agent}):
        raise UserError(f"{made} with an agent other than {name}; {way_out}")


def file_sha256(paths: Iterable[Path]) -> str:
    """Return the SHA-256 digest of the concatenated contents of files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
