"""Compute and compare digests of the agent and the recording that a result was computed from.

An agent's digest covers its weights and edits, and does not depend on how its file is written. A
recording's digest covers the arrays and tables of all its episodes. ``recording.json`` stores the
digests of the episodes under CONTENTS: ``{number: [bytes, sha256]}``. A stored digest is trusted if
the files of the episode have this total size and are not newer than ``recording.json``; otherwise
they are read.

Earlier versions stored checksums of agent files instead; those of the shipped agents' earlier files
are in EARLIER_FILES. Recordings without digests of their episodes are identified
by their index and ``recording.json``. Both forms are still accepted.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

from agents.agent_file import load_agent, weights_sha256
from common.errors import UserError
from common.files import is_sha256, read_bytes, sha256

CONTENTS = "contents"  # key in recording.json
# Checksums of earlier files of the shipped agents, by the digest of the weights. Agent files also
# have such a list, which is not believed, because any file could claim to be another agent.
EARLIER_FILES = {
    "b14d8d28cbd6ba9e5196d4dd83d57706bbabbb2b167f9a3eb1b437135bcc6371": (
        "8525abe4cbe70e4c8239924731fb415cc66a4871239fae8f5bd1f1fabb371120",
        "87270f882b223369a01d689602d8ec7fd59b6fd22c83f1a0d5e605253ea1e93f"),
    "4005f42ebde8068fd6d8cde1e63e1aa5d56eafeb2e4c6e39fe3b72abb7591be4": (
        "3b4e5616516191731bb7d5a37637698e2fd4a7ac281410c298feabaab98a5c40",
        "6742d717ee18fc0b46dad9f1d387c9349f8796991b77f1fc8527fa0855767bb0"),
    "abf34f258185a3e676d9c572725ece74b189861f6a17408ad5e7f6e29d0cfa9d": (
        "883e83787d92453a3a90c7790758c107448e1c95847d80f7c26555156978b201",
        "e885ca2bca1088a99551d150cbb7d37bbe8a305810f1669eadadf4686ea82301")}

logger = logging.getLogger(__name__)


def agent_sha256(path: Path) -> str:
    """Return the digest of an agent's weights and edits.

    Raises:
        UserError: if the file is missing or not an agent file.
    """
    return weights_sha256(load_agent(path))


def agent_digests(path: Path) -> frozenset[str]:
    """Return the digest of an agent, and the checksums of its file and of earlier files of shipped
    agents with the same weights; results may identify the agent by any of them.

    Raises:
        UserError: if the file is missing, damaged or not an agent file.
    """
    digest = agent_sha256(path)
    return frozenset({digest, sha256(path, "agent file"), *EARLIER_FILES.get(digest, ())})


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


def is_digest(stored: object) -> TypeGuard[list]:
    """Return whether an entry of CONTENTS has the right form, so that it may be trusted."""
    return (isinstance(stored, list) and len(stored) == 2 and type(stored[0]) is int
            and is_sha256(stored[1]))


def file_sha256(paths: Iterable[Path]) -> str:
    """Return the SHA-256 digest of the concatenated contents of files.

    Raises:
        UserError: if a path is not a regular file.
    """
    digest = hashlib.sha256()
    for path in paths:
        digest.update(read_bytes(path))
    return digest.hexdigest()
