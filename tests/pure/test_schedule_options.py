"""Options behind a schedule's name."""

from pathlib import Path

import pytest

from interlace.errors import InputError
from interlace.schedules.eager_folded import eager_folded
from interlace.schedules.finder import find
from interlace.schedules.interleaved import interleaved

RANKS, COUNT = 4, 9


def test_options_are_those_of_the_function() -> None:
    """Actions of the function called with them; the name says so, without blanks, and finds the
    same again."""
    found = find("eager_folded( depth = 5 )")
    assert found.name == "eager_folded(depth=5)"
    assert found.of_ranks(RANKS, COUNT) == eager_folded(RANKS, COUNT, depth=5)
    again = find(found.name)
    assert again.of_ranks(RANKS, COUNT) == found.of_ranks(RANKS, COUNT)
    assert found.of_ranks(RANKS, COUNT) != find("eager_folded").of_ranks(RANKS, COUNT)


def test_chunks_are_an_option() -> None:
    """They are the schedule's own, as if they were its default."""
    found = find("interleaved(chunks=4)")
    assert found.chunks == 4
    assert found.of_ranks(2, 4) == interleaved(2, 4, chunks=4)
    assert found.of_ranks(2, 4, 3) == interleaved(2, 4, chunks=3)


def test_a_users_function_takes_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `module:function` as well."""
    source = (
        "from interlace.schedules.interleaved import interleaved\n"
        "def order(ranks, micro_batches, chunks=2):\n"
        "    return interleaved(ranks, micro_batches, chunks)\n"
    )
    (tmp_path / "own_interleaved.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find("own_interleaved:order(chunks=3)")
    assert (found.name, found.chunks) == ("own_interleaved:order(chunks=3)", 3)
    assert found.of_ranks(2, 4) == interleaved(2, 4, chunks=3)


def test_depths_below_the_default() -> None:
    """Their names find schedules of so many downs ahead."""
    variants = find("eager_folded").variants(RANKS)
    names = [f"eager_folded(depth={depth})" for depth in (4, 5, 6, 7)]
    assert [each.name for each in variants] == names
    made = [find(name).of_ranks(RANKS, COUNT) for name in names]
    assert made == [eager_folded(RANKS, COUNT, depth=depth) for depth in (4, 5, 6, 7)]
    assert variants[0].variants(RANKS) == (variants[0],)
    plain = find("folded")
    assert plain.variants(RANKS) == (plain,)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eager_folded(deep=5)", "no option 'deep'"),
        ("eager_folded(depth=five)", "'depth=five' is no option and its whole number"),
        ("eager_folded(depth)", "'depth' is no option"),
        ("folded()", "'' is no option"),
        ("gpipe(ranks=3)", "no option 'ranks'"),
        ("eager_fold(depth=5)", "unknown schedule 'eager_fold'"),
        ("eager_folded(depth=9)", "cannot run 9 steps ahead"),
        ("folded(chunks=3)", "two chunks on each rank, not 3"),
    ],
)
def test_what_is_no_option_is_refused(name: str, words: str) -> None:
    """By name, with the values."""
    with pytest.raises(InputError) as caught:
        find(name).of_ranks(RANKS, COUNT)
    assert words in caught.value.message
    assert caught.value.hint
