"""Files of the analysis of the agent's hidden states: writer and reader of
``analysis/hx_analysis_precomp/``.

Layout, as published but for the file marked *; N is the number of recorded episodes, M that of
simulated samples, and rows are the states ``hx[1:]`` of episode 0, then of episode 1, and so on::

    hx_mu_N, hx_std_N                               mean and standard deviation of units (D,)
    hx_outlier_mask_N                               bool (rows,), True for an outlier
    hx_outlier_retention_fraction                   share of the rows that are none ()
    pcomponents_N                                   principal components (P, D)
    pc_loading_variances_N, pc_singular_values_N    (P,)
    hx_pca_N                                        principal coordinates (rows, P)
    gen_hx_projected_realN_genM                     of the simulated states (M * T, P)
    ica_unmixing_matrix_hx_N, ica_mixing_matrix_hx_N    (k, k)
    ica_source_signals_hx_N                         independent coordinates (rows, k)
    clusters_hx_N                                   cluster of each row, -1 for none (rows,)
    cluster_means_hx_N                              means of the first principal coordinates (C, p)
    tsne_hx_N                                       (rows, 2)
    nmf_hx_N, nmf_components_hx_N                   weights (rows, F) and factors (F, D)
    nmf_min_per_dim_hx_N                            what was subtracted before (D,)
    settings_N.json *                               what made them, and how each step went

All are ``.npy`` files but the last. Results of several N lie side by side.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from common.description import read_description
from common.files import TEMPORARY_SUFFIX, atomic_path, read_array, save_json

SCRIPT = "analysis/hidden_analysis_precompute.py"
MATRICES = {"mean": "hx_mu", "std": "hx_std", "components": "pcomponents",
            "variances": "pc_loading_variances", "unmixing": "ica_unmixing_matrix_hx",
            "mixing": "ica_mixing_matrix_hx"}
_STEMS = {**MATRICES, "outliers": "hx_outlier_mask", "singular_values": "pc_singular_values",
          "principal": "hx_pca", "sources": "ica_source_signals_hx", "clusters": "clusters_hx",
          "cluster_means": "cluster_means_hx", "tsne": "tsne_hx", "nmf": "nmf_hx",
          "nmf_components": "nmf_components_hx", "nmf_min": "nmf_min_per_dim_hx"}
_GENERATED, _RETENTION = "generated", "retention"


def matrix_files(folder: Path, num_episodes: int) -> dict[str, Path]:
    """The files of the projector, by its attributes."""
    files = HiddenStatesFolder(folder, num_episodes)
    return {name: files.file(name) for name in MATRICES}


class HiddenStatesFolder:
    """Names and readers of the results for one number of episodes."""

    def __init__(self, path: Path, num_episodes: int):
        self.path = Path(path)
        self.num_episodes = num_episodes

    @property
    def settings_file(self) -> Path:
        return self.path / f"settings_{self.num_episodes}.json"

    def file(self, name: str, num_samples: int | None = None) -> Path:
        """The file of an array; ``num_samples`` is needed for ``generated`` alone."""
        if name == _GENERATED:
            return self.path / f"gen_hx_projected_real{self.num_episodes}_gen{num_samples}.npy"
        if name == _RETENTION:
            return self.path / "hx_outlier_retention_fraction.npy"
        return self.path / f"{_STEMS[name]}_{self.num_episodes}.npy"

    def read(self, name: str, num_samples: int | None = None) -> np.ndarray:
        """An array.

        Raises:
            UserError: if its file is missing or damaged.
        """
        return read_array(self.file(name, num_samples), written_by=SCRIPT)

    def settings(self) -> dict:
        """What made the arrays; empty for published ones, which do not say."""
        return read_description(self.settings_file)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a step gives.

    Attributes:
        arrays: by their names in the folder.
        facts: how it went, for the settings file.
    """

    arrays: dict[str, np.ndarray]
    facts: dict


class HiddenStatesWriter:
    """Collects the results of the steps in a hidden folder and moves them into place at the end.

    A killed run goes on behind the last step it finished, if it is asked for the same again. Old
    results are removed before new ones take their places, so that no reader ever finds a mixture
    of both: at worst it misses a file.

    Args:
        folder: where the results belong.
        description: what makes them.
        num_samples: in the name of the simulated states, None without them.
        report: called after each step with its name and its seconds.

    Attributes:
        facts: of each step so far.
    """

    def __init__(self, folder: HiddenStatesFolder, description: dict, num_samples: int | None,
                 report: Callable[[str, float], None]):
        self.folder, self.num_samples, self._report = folder, num_samples, report
        self.description = json.loads(json.dumps(description))  # as it looks after a round trip
        self.facts: dict[str, dict] = {}
        self._seconds: dict[str, float] = {}
        working = folder.path / f".{folder.num_episodes}{TEMPORARY_SUFFIX}"
        self._working = HiddenStatesFolder(working, folder.num_episodes)
        if working.exists() and self._working.settings() != self.description:
            shutil.rmtree(working)
        working.mkdir(parents=True, exist_ok=True)
        save_json(self._working.settings_file, self.description)

    def step(self, name: str, compute: Callable[[], Result]) -> dict[str, np.ndarray]:
        """The arrays of a step: computed and stored, or read if an earlier run did that."""
        record_file = self._working.path / f"step_{name}.json"
        record = read_description(record_file)
        if record:
            arrays = {array: self._working.read(array, self.num_samples)
                      for array in record["arrays"]}
        else:
            begin = time.perf_counter()
            result = compute()
            arrays = result.arrays
            for array, values in arrays.items():
                with atomic_path(self._working.file(array, self.num_samples)) as temporary:
                    np.save(temporary, values, allow_pickle=False)
            record = {"arrays": list(arrays), "facts": result.facts,
                      "seconds": round(time.perf_counter() - begin, 2)}
            save_json(record_file, record)
        self._seconds[name], self.facts[name] = record["seconds"], record["facts"]
        self._report(name, record["seconds"])
        return arrays

    def finish(self) -> list[Path]:
        """Move everything into place, the settings last; returns the files."""
        arrays = sorted(self._working.path.glob("*.npy"))
        self.folder.settings_file.unlink(missing_ok=True)
        for path in arrays:
            (self.folder.path / path.name).unlink(missing_ok=True)
        written = []
        for path in arrays:
            written.append(self.folder.path / path.name)
            os.replace(path, written[-1])
        save_json(self.folder.settings_file,
                  {**self.description, "steps": self.facts, "seconds": self._seconds})
        shutil.rmtree(self._working.path)
        return [*written, self.folder.settings_file]
