"""A game and its levels; Procgen need not be installed."""

from __future__ import annotations

import dataclasses
import random

from common.errors import UserError, nearest
from common.game_constants import GAMES

MAX_LEVEL = 2**31 - 1
# Level of each game in the mode "exploration", as in Procgen.
_EXPLORATION_LEVELS = {
    "coinrun": 1949448038, "caveflyer": 1259048185, "leaper": 1318677581, "jumper": 1434825276,
    "maze": 158988835, "heist": 876640971, "climber": 1561126160, "ninja": 1123500215}

GAMES_OF_MODE = {
    "easy": GAMES,
    "hard": GAMES,
    "extreme": ("chaser", "dodgeball", "leaper", "starpilot"),
    "memory": ("caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"),
    "exploration": tuple(_EXPLORATION_LEVELS),
}


DISPLAY_OPTIONS = ("restrict_themes", "use_monochrome_assets", "use_sequential_levels",
                   "center_agent")


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    """A game and its levels.

    Attributes:
        env_name: one of the 16 Procgen games.
        distribution_mode: ``easy``, ``hard``, ``extreme``, ``memory`` or ``exploration``; not
            every game has every mode.
        start_level: seed of the first level; must be 0 if ``num_levels`` is 0.
        num_levels: number of consecutive level seeds; 0 for all of them.
        use_backgrounds: whether the game draws background images. The published agents were
            trained without them.
        restrict_themes: whether all levels have the same theme.
        use_monochrome_assets: whether objects are drawn as rectangles of one colour.
        use_sequential_levels: whether the next level follows in the same episode when a level is
            solved, so that episodes end only by failure.
        center_agent: whether frames show the player's surroundings instead of the whole level, in
            games where this differs.

    The last four are attributes of the object, as ``vars`` returns them, only if they differ from
    their defaults, so that settings of results without them stay equal.

    Raises:
        UserError: if there is no such game or mode, or the range of levels is invalid.

    Example::

        >>> env = EnvConfig("coinrun", "hard", num_levels=1000)
        >>> unseen = env.unseen_levels()
        >>> assert min(unseen.draw_levels(5, seed=0)) >= 1000
    """

    env_name: str
    distribution_mode: str
    start_level: int = 0
    num_levels: int = 0
    use_backgrounds: bool = False
    restrict_themes: bool = False
    use_monochrome_assets: bool = False
    use_sequential_levels: bool = False
    center_agent: bool = True

    def __post_init__(self):
        for name in DISPLAY_OPTIONS:
            if vars(self).get(name) == getattr(type(self), name):
                vars(self).pop(name, None)
        if self.env_name not in GAMES:
            raise UserError(f"there is no Procgen game '{self.env_name}'"
                            f"{nearest(self.env_name, GAMES)}")
        mode = self.distribution_mode
        if mode not in GAMES_OF_MODE:
            raise UserError(f"unknown distribution mode '{mode}'{nearest(mode, GAMES_OF_MODE)}")
        if self.env_name not in GAMES_OF_MODE[mode]:
            raise UserError(f"{self.env_name} has no distribution mode '{mode}'; "
                            f"the games that have it: {', '.join(GAMES_OF_MODE[mode])}")
        if self.start_level < 0 or self.num_levels < 0:
            raise UserError("start_level and num_levels must not be negative")
        if self.start_level and not self.num_levels:
            raise UserError("start_level needs num_levels above 0, because 0 selects all levels")
        if self.start_level + self.num_levels > MAX_LEVEL:
            raise UserError(f"start_level + num_levels must not exceed {MAX_LEVEL}")

    @property
    def levels(self) -> range:
        """Level seeds in use; a single one in mode ``exploration``."""
        if self.distribution_mode == "exploration":
            level = _EXPLORATION_LEVELS[self.env_name]
            return range(level, level + 1)
        if self.num_levels == 0:
            return range(MAX_LEVEL)
        return range(self.start_level, self.start_level + self.num_levels)

    def draw_levels(self, num: int, seed: int) -> list[int]:
        """Draw ``num`` level seeds, which are distinct while unused seeds remain.

        A larger ``num`` with the same seed only extends the list.
        """
        rng = random.Random(seed)
        drawn: list[int] = []
        seen: set[int] = set()
        while len(drawn) < num:
            level = rng.choice(self.levels)
            if level not in seen or len(seen) == len(self.levels):
                drawn.append(level)
                seen.add(level)
        return drawn

    def unseen_levels(self) -> EnvConfig:
        """Return the same game with all level seeds above the current range.

        If ``num_levels`` is 0, the range covers all 2**31 - 1 levels, of which a run sees a
        negligible part. The configuration is then returned unchanged.

        Raises:
            UserError: if no level is left.
        """
        if self.num_levels == 0:
            return self
        start = self.start_level + self.num_levels
        if start == MAX_LEVEL:
            raise UserError("no unseen levels are left above start_level + num_levels")
        return dataclasses.replace(self, start_level=start, num_levels=MAX_LEVEL - start)
