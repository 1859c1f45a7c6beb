"""Makes the rooms importable from anywhere: ``pip install -e .``; requirements.txt has the pins."""

from setuptools import setup

setup(
    name="procgen-agent-interpretability",
    version="0.1.0",
    description="Understanding recurrent PPO agents on Procgen with gradients through a learned "
                "copy of their environment",
    license="MIT",
    python_requires=">=3.10,<3.13",
    packages=["agents", "common", "generative", "analysis", "pipeline"],
)
