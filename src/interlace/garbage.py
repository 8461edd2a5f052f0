"""Python's search for garbage, put off while something makes millions of objects that live on."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, Python does not look for garbage in cycles: a trace makes millions of objects that
    live on, which the collector would walk again and again. For 80 layers that is a sixth of the
    time, and what is left lying until the end are 70 MiB; fake tensors have no memory of their own.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
