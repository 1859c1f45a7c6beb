"""Makes the rooms importable from anywhere: ``pip install -e .``; requirements.txt has the pins."""

from setuptools import find_packages, setup

setup(
    name="procgen-agent-interpretability",
    version="0.1.0",
    description="Understanding recurrent PPO agents on Procgen with gradients through a learned "
                "copy of their environment",
    license="MIT",
    python_requires=">=3.11,<3.13",
    packages=find_packages(exclude=["tests", "tests.*"]),
    # The root as an entry of the import path, last: so the rooms are found as packages from
    # everywhere, also beside an output folder of the same name.
    options={"editable_wheel": {"mode": "compat"}},
)
