"""Attribution of an agent's outputs to its layers, and the features those are made of.

For those who used the published package: ``from attribution import run``.
"""


def __getattr__(name: str):
    if name == "run":  # when it is asked for: it needs what the scripts need
        from attribution.published_run import run
        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
