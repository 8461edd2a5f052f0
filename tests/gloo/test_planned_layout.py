"""A run file that the search of layouts wrote is trained as it is, on real processes."""

import json
from pathlib import Path

import pytest
from training import Workplace

CASES = {
    "stages": ["--parallel.pipeline", "2"],
    "shards": ["--parallel.data_shard", "2", "--train.recompute", "layer"],
    "experts of ranks that share sequences": [
        *("--model.architecture", "moe", "--model.experts.count", "4"),
        *("--parallel.context", "2", "--parallel.expert", "2", "--train.recompute", "layer"),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_trained_as_it_is(case: str, tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    model = ["--model.layers", "4", "--model.vocab_size", "256", "--parallel.tensor", "1"]
    search = ["--cluster", "h100x2", "--global-batch", "8", "-o", "planned.toml"]
    said = place.interlace("plan", "run.toml", *model, *CASES[case], *search)
    assert "what each technique gives" in said
    place.interlace("train", "planned.toml")
    metrics = [
        json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    ]
    assert max(each.get("step", 0) for each in metrics) == 4
