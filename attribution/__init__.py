"""Attribution of an agent's outputs to the activations and features of its layers.

``from attribution import run`` gives the entry point of the package that was published with
"Understanding RL Vision".
"""


def __getattr__(name: str):
    if name == "run":  # imported lazily, because it needs the dependencies of the scripts
        from attribution.published_run import run
        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
