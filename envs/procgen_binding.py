"""Procgen's own environments, with access to the states of single environments.

Only this module imports Procgen.
"""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Callable, Iterator

from envs.level_state import LevelState

with contextlib.redirect_stderr(io.StringIO()):  # gym, which procgen imports, prints a notice
    from procgen import ProcgenGym3Env
    from procgen.env import MAX_STATE_SIZE


class Procgen(ProcgenGym3Env):
    """Procgen's environments, with access to the states of single environments."""

    def __init__(self, num: int, env_name: str, **options):
        super().__init__(num, env_name, **options)
        self._game = env_name
        self._state: object | None = None  # buffer that states are read into

    def state_of(self, index: int) -> bytes:
        """Return the state of one environment; all environments must have been observed."""
        if self._state is None:
            self._state = self._ffi.new("char[]", MAX_STATE_SIZE)
        size = self.call_c_func("get_state", index, self._state, MAX_STATE_SIZE)
        return bytes(self._ffi.buffer(self._state, size))

    def edit(self, index: int, edit: Callable[[bytes], bytes]) -> None:
        """Edit one environment; the next ``observe`` shows it.

        Raises:
            UserError: if the result would crash Procgen.
        """
        edited = edit(self.state_of(index))
        LevelState.parse(edited, self._game)
        self.call_c_func("set_state", index, edited, len(edited))


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection: freeing an environment while cffi loads a library deadlocks."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
