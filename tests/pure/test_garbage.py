"""Proves that Python's search for garbage is put off, and comes back as it was."""

import gc

import pytest

from interlace.garbage import no_collections


def test_nothing_is_searched_inside_nor_right_after_it() -> None:
    """Cycles that are left lie until the next search of everything: no small object causes one."""
    searches: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        searches.append(phase)

    gc.callbacks.append(note)
    try:
        with no_collections():
            made: list[list[object]] = [[] for _ in range(50_000)]
            for each in made:
                each.append(each)
        few = [[] for _ in range(100)]
    finally:
        gc.callbacks.remove(note)
    assert len(few) == 100
    assert not searches
    assert gc.isenabled()
    assert not gc.get_freeze_count()
    made.clear()
    del each
    assert gc.collect() >= 50_000


def test_inside_of_another_one_nothing_changes() -> None:
    with no_collections():
        with no_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_a_caller_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        with no_collections():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_it_comes_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="on the way"), no_collections():
        raise ValueError("on the way")
    assert gc.isenabled()
