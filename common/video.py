"""Videos of episodes: enlarged frames, marks of actions, rewards and ends of episodes, and MP4, GIF
and PNG files.

Shapes of frames are (H, W, C): height, width and colour channels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from common.errors import UserError
from common.files import atomic_path
from common.game_constants import ACTION_DIRECTIONS, ACTION_NAMES
from common.schemas import Entry, File, Schema

RENDERING = Schema("a rendering", "render.py", items={
    **{view: Entry(f"episode_{{:0>5}}_{view}.mp4", File()) for view in ("agent", "person")},
    "strip": Entry("episode_{:0>5}_strip.png", File())},
    settings_name="rendering.json", flag="--vid_dir")
FRAMES_PER_SECOND = 15
TITLE_HEIGHT = 16
FULL_REWARD = 10.0  # reward of a coin in CoinRun


def enlarge(frame: np.ndarray, factor: int) -> np.ndarray:
    """Enlarge a frame (H, W, C) to (factor * H, factor * W, C) by repeating pixels."""
    return frame.repeat(factor, axis=1).repeat(factor, axis=0)  # axis 1 first, for speed


def mark_action(frame: np.ndarray, action: int) -> np.ndarray:
    """Return a copy of a uint8 frame (H, W, C) with a mark of the action in the lower left corner.

    The mark is an arrow for a move, a ring for no move, and the number of one of the keys that fire
    or throw in some games (actions 9 to 14).
    """
    size = frame.shape[0] // 5
    stamp = _stamp(int(action), size)  # (size, size, 4)
    opacity = stamp[..., 3:].astype(np.uint16)
    marked = frame.copy()
    corner = marked[-size:, :size]
    corner[:] = (stamp[..., :3] * opacity + corner * (255 - opacity)) // 255
    return marked


@functools.lru_cache(maxsize=64)
def _stamp(action: int, size: int) -> np.ndarray:
    """Draw the mark of an action, RGBA (size, size, 4), downscaled for smooth edges."""
    big = 8 * size
    image = Image.new("RGBA", (big, big))
    draw = ImageDraw.Draw(image)
    draw.ellipse((0.04 * big, 0.04 * big, 0.96 * big, 0.96 * big), fill=(255, 255, 255, 215),
                 outline=(0, 0, 0, 255), width=big // 30)
    right, up = ACTION_DIRECTIONS[action]
    if action >= len(ACTION_NAMES):
        draw.text((big / 2, big / 2), str(action), (200, 30, 30, 255), anchor="mm",
                  font=ImageFont.load_default(0.6 * big), stroke_width=big // 60)
    elif right == up == 0:
        draw.ellipse((0.38 * big, 0.38 * big, 0.62 * big, 0.62 * big), outline=(200, 30, 30, 255),
                     width=big // 20)
    else:
        angle = math.atan2(-up, right)

        def point(along: float, across: float) -> tuple[float, float]:
            return (big * (0.5 + along * math.cos(angle) - across * math.sin(angle)),
                    big * (0.5 + along * math.sin(angle) + across * math.cos(angle)))

        draw.polygon([point(0.36, 0), point(0.02, 0.24), point(0.02, 0.08), point(-0.34, 0.08),
                      point(-0.34, -0.08), point(0.02, -0.08), point(0.02, -0.24)],
                     fill=(200, 30, 30, 255))
    return np.asarray(image.resize((size, size), Image.Resampling.LANCZOS))


def mark_terminal(frame: np.ndarray, probability: float) -> np.ndarray:
    """Return a copy of a uint8 frame (H, W, C) with a box in the upper left corner.

    The blue filling of the box shows the probability that the episode ends.
    """
    return _mark_box(frame, probability, (60, 90, 230), on_the_right=False)


def mark_reward(frame: np.ndarray, reward: float) -> np.ndarray:
    """Return a copy of a uint8 frame (H, W, C) with a box in the upper right corner.

    The box is filled from the bottom in proportion to the reward's size, up to FULL_REWARD: in
    green, or in red if the reward is negative.
    """
    colour = (40, 180, 60) if reward >= 0 else (200, 30, 30)
    return _mark_box(frame, abs(reward) / FULL_REWARD, colour, on_the_right=True)


def _mark_box(frame: np.ndarray, share: float, colour: tuple[int, int, int],
              on_the_right: bool) -> np.ndarray:
    size = frame.shape[0] // 6
    border = max(size // 10, 1)
    box = np.zeros((size, size, 3), np.uint8)
    inside = box[border:-border, border:-border]
    inside[:] = 255
    height = round(len(inside) * min(max(share, 0.0), 1.0))
    inside[len(inside) - height:] = colour
    marked = frame.copy()
    left = frame.shape[1] - size if on_the_right else 0
    marked[:size, left:left + size] = box
    return marked


def by_direction(frames: Sequence[np.ndarray]) -> np.ndarray:
    """Arrange frames (H, W, C) of actions 0 to 8 by direction in an image (3H, 3W, C)."""
    rows = [[frames[0]] * 3 for _ in range(3)]
    for (right, up), frame in zip(ACTION_DIRECTIONS[:len(ACTION_NAMES)], frames):
        rows[1 - up][1 + right] = frame
    return np.vstack([np.hstack(row) for row in rows])


def write_video(path: Path, frames: Iterable[np.ndarray], fps: int = FRAMES_PER_SECOND) -> None:
    """Write uint8 frames (H, W, 3), H and W even, as an H.264 MP4 file, atomically."""
    with atomic_path(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps,
                                      options={"preset": "ultrafast", "crf": "23"})
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        for frame in frames:
            if not stream.codec_context.is_open:
                stream.height, stream.width = frame.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def write_gif(path: Path, frames: Iterable[np.ndarray], fps: float) -> None:
    """Write uint8 frames (H, W, 3) as a looping GIF, atomically.

    The palette of 256 colours is chosen for the first frame.

    Args:
        fps: frames per second.
    """
    images = [Image.fromarray(frame) for frame in frames]
    palette = images[0].quantize(256)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    with atomic_path(path) as temporary:
        images[0].save(temporary, save_all=True, append_images=images[1:], loop=0,
                       duration=round(1000 / fps))


def write_poster(path: Path, film: Path) -> None:
    """Write a frame of an MP4 file as an image, which pages show before the video is played.

    The frame is taken after a third of the video, when the episode has begun and saliency maps are
    not yet blank. They are blank after the last step at which the differentiated function is
    evaluated.

    Args:
        path: image to write.
        film: MP4 file.

    Raises:
        UserError: if the video is damaged or not a regular file.
    """
    if not film.is_file():
        raise UserError(f"{film} is not a file")
    try:
        with av.open(str(film)) as container:
            place = container.streams.video[0].frames // 3
            frame = next(itertools.islice(container.decode(video=0), place, None))
    except (av.FFmpegError, IndexError, StopIteration):
        raise UserError(f"{film} is damaged: it is not a video") from None
    with atomic_path(path) as temporary:
        frame.to_image().save(temporary)


def side_by_side(columns: dict[str, np.ndarray], factor: int) -> Iterator[np.ndarray]:
    """Yield frames that show several videos next to each other, each below its title.

    Args:
        columns: videos of T frames by title, uint8 (T, rows, H, W, 3); the rows of a column are
            stacked.
        factor: integer factor by which frames are enlarged.

    Yields:
        uint8 frames (TITLE_HEIGHT + factor * rows * H, factor * columns * W, 3).
    """
    header = None
    for rows in zip(*columns.values()):
        body = np.hstack([enlarge(np.concatenate(column), factor) for column in rows])
        if header is None:
            width = body.shape[1] // len(columns)
            image = Image.new("RGB", (body.shape[1], TITLE_HEIGHT), (255, 255, 255))
            for number, title in enumerate(columns):
                ImageDraw.Draw(image).text((number * width + 4, 2), title, fill=(0, 0, 0))
            header = np.asarray(image)
        yield np.concatenate([header, body])


def strip(rows: list[list[np.ndarray]], size: int) -> Image.Image:
    """Arrange rows of uint8 frames (H, W, 3) in one image on white ground, with each frame resized
    to a square of ``size`` pixels."""
    gap = size // 32
    width, height = len(rows[0]) * (size + gap) - gap, len(rows) * (size + gap) - gap
    image = Image.new("RGB", (width, height), (255, 255, 255))
    for i, row in enumerate(rows):
        for j, frame in enumerate(row):
            small = Image.fromarray(frame).resize((size, size), Image.Resampling.LANCZOS)
            image.paste(small, (j * (size + gap), i * (size + gap)))
    return image


def frames_of(image: Image.Image, size: int) -> np.ndarray:
    """Return the frames in an image from ``strip``, without empty places.

    Args:
        image: image with frames of equal size.
        size: height and width of the frames.

    Returns:
        uint8 (n, size, size, 3).
    """
    pixels, pitch = np.asarray(image.convert("RGB")), size + size // 32
    frames = np.stack([pixels[y:y + size, x:x + size] for y in range(0, image.height, pitch)
                       for x in range(0, image.width, pitch)])
    return frames[(frames < 255).any(axis=(1, 2, 3))]


def write_strip(path: Path, rows: list[list[np.ndarray]], size: int) -> None:
    """Write the image of ``strip`` as a PNG file, atomically."""
    with atomic_path(path) as temporary:
        strip(rows, size).save(temporary)
