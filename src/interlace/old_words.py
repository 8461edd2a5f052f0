"""Words that run files, plan files and calls may still use, and what they are called now.

Every place that takes such a word asks `present_search`, so that the list is here alone. Records of
runs that were made with the old words are history and stay as they are.
"""

import logging
import os
from collections.abc import Mapping
from types import MappingProxyType

SEARCHES: Mapping[str, str] = MappingProxyType({"exact": "merge", "paper": "segment_pairs"})
"""The present name of a search, by the name that it had before."""


def present_search(word: str, where: str) -> str:
    """What the search `word` is called now, itself if it has always been called so. An old word is
    noted in the log once, by rank 0; `where` says what names it, such as a key of a run file."""
    name = SEARCHES.get(word, word)
    if name != word and os.environ.get("RANK", "0") == "0":
        said = 'note: %s = "%s" is now called "%s"'
        logging.getLogger("interlace").warning(said, where, word, name)
    return name
