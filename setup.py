"""Package metadata. ``make`` installs the pinned versions of requirements.txt instead."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
SCRIPTS = [path.stem for path in ROOT.glob("*.py")
           if path.name != "setup.py" and not path.is_symlink()]
DATA = ["hyperparams", "hyperparams.procgen", "hyperparams.stages", "analysis.templates",
        "common.templates", "pipeline.templates",
        *(f"web.built.{path.name}" for path in (ROOT / "web" / "built").iterdir())]

setup(
    name="procgen-agent-interpretability",
    version="0.1.0",
    description="Understanding recurrent PPO agents on Procgen with gradients through a learned "
                "copy of their environment",
    license="MIT",
    python_requires=">=3.11,<3.13",
    install_requires=[
        "torch>=2.4", "procgen-mirror>=0.10.7", "gym>=0.26,<1", "numpy>=1.26,<2", "pandas>=2.2,<3",
        "scipy>=1.13", "scikit-learn>=1.5", "hdbscan>=0.8.40", "openTSNE>=1.0.2",
        "pynndescent>=0.5.13", "numba>=0.60", "matplotlib>=3.9", "pillow>=10", "av>=13",
        "pyyaml>=6", "tqdm>=4.66", "tensorboard>=2.17", "joblib>=1.4", "threadpoolctl>=3.5",
        "jinja2>=3.1", "markdown>=3.6", "captum>=0.7"],
    extras_require={"notebook": ["jupyterlab>=4"], "gym": ["gymnasium>=1.1"],
                    "hdf5": ["h5py>=3.10"]},
    packages=[*find_packages(exclude=["tests", "tests.*", "tools", "benchmarks"]), *DATA],
    package_data={name: ["*"] for name in DATA},
    py_modules=SCRIPTS,
    # Editable installations append the root to the import path, so that output folders with the
    # name of a package do not hide the package.
    options={"editable_wheel": {"mode": "compat"}},
)
