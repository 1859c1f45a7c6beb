"""Figures of losses over simulated steps, from files of the published and of our experiment."""

import numpy as np
import pandas as pd
import pytest

from analysis.plot_loss_over_time import draw_losses, main, read_losses
from common.files import save_json

LOSSES = {"obs": [3.0, 2.0, 4.0], "total recon w/o KL": [5.0, 4.0, 7.0]}
BANDS = {"obs_mean": [3.0, 2.0], "obs_min": [1.0, 1.5], "obs_max": [9.0, 2.5]}
TABLE = pd.DataFrame({
    "step": [0, 1, 0, 0], "predictor": ["simulator", "simulator", "mean_frame", "simulator"],
    "kind": ["image", "image", "image", "psnr"], "windows": 8, "mean": [2.0, 3.0, 7.0, 30.0],
    "standard_deviation": 1.0, "low_95": [1.0, 2.0, 6.0, 29.0], "high_95": [4.0, 5.0, 8.0, 31.0]})


def drawn(path):
    """Return the legend and, per line, its points and the ends of its band at the first step."""
    axes = draw_losses(read_losses(path), "title").axes[0]
    bands = [band.get_paths()[0].vertices if band.get_paths() else None
             for band in axes.collections]
    return {line.get_label(): (line.get_xydata().tolist(), band if band is None else (
        band[band[:, 0] == line.get_xdata()[0], 1].min(),
        band[band[:, 0] == line.get_xdata()[0], 1].max()))
        for line, band in zip(axes.lines, bands)}


def test_a_published_file_gives_a_line_per_loss_from_step_1(tmp_path):
    save_json(tmp_path / "20210730_124423.json", LOSSES)
    lines = drawn(tmp_path / "20210730_124423.json")
    assert {name: points for name, (points, _) in lines.items()} == {
        name: [[1, values[0]], [2, values[1]], [3, values[2]]] for name, values in LOSSES.items()}


def test_a_published_file_with_extremes_gives_a_band_between_them(tmp_path):
    save_json(tmp_path / "losses.json", BANDS)
    assert drawn(tmp_path / "losses.json") == {"obs": ([[1, 3], [2, 2]], (1, 9))}


def test_our_table_gives_the_losses_of_the_simulator_with_intervals(tmp_path):
    TABLE.to_csv(tmp_path / "loss_over_time.csv", index=False)
    assert drawn(tmp_path / "loss_over_time.csv") == {"image": ([[0, 2], [1, 3]], (1, 4))}
    assert main(["--presaved_data_path", str(tmp_path)]) == 0
    assert (tmp_path / "loss_over_time.png").exists()


def test_the_figure_replaces_only_figures_of_the_script(tmp_path, capsys):
    save_json(tmp_path / "losses.json", LOSSES)
    argv = ["--presaved_data_path", str(tmp_path / "losses.json")]
    figure = tmp_path / "losses.png"
    figure.write_bytes(b"a thesis")
    assert main(argv) == 2 and figure.read_bytes() == b"a thesis"
    assert f"{figure} exists, and this script did not write it" in capsys.readouterr().err
    assert main([*argv, "--overwrite"]) == 0 and main(argv) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert main([*argv, "--output", str(tmp_path / "other.png")]) == 0
    assert (tmp_path / "other.png").exists()


@pytest.mark.parametrize("content", [
    [1, 2], {"obs": 3}, {"obs": [1, 2], "hx": [1]}, {"obs": ["a"]}, {"obs": [[1], [2]]}, {}])
def test_a_file_without_losses_is_refused(content, tmp_path, capsys):
    save_json(tmp_path / "losses.json", content)
    assert main(["--presaved_data_path", str(tmp_path / "losses.json")]) == 2
    assert "does not hold one list of losses per name" in capsys.readouterr().err
    assert not (tmp_path / "losses.png").exists()
    assert np.all([path.suffix == ".json" for path in tmp_path.iterdir()])
