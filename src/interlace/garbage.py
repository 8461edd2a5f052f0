"""Python's search for garbage, put off while something makes millions of objects that live on."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, Python does not look for garbage in cycles: a trace makes millions of objects that
    live on, which the collector would walk again and again. For 80 layers that is a sixth of the
    time, and what is left lying until the end are 70 MiB; fake tensors have no memory of their own.

    Afterwards they count as old: as new ones they would all be walked at the next small object.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what a caller has frozen stays so
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()
