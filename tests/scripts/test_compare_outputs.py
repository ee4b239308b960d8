from __future__ import annotations

import json
from pathlib import Path

import pytest

from compare_outputs import main

BASE = {"outputs": [{"token_ids": [5, 7], "logprobs": [{"5": -0.5, "9": -2.0}, -0.25]}]}


def write(path: Path, document: object) -> str:
    path.write_text(json.dumps(document))
    return str(path)


def run(tmp_path: Path, a: object, b: object, *more: str) -> int:
    return main([write(tmp_path / "a.json", a), write(tmp_path / "b.json", b), *more])


def changed(tokens: list[int], logprobs: list[object]) -> dict[str, object]:
    return {"outputs": [{"token_ids": tokens, "logprobs": logprobs}]}


def test_equal_outputs_pass_and_the_tolerance_is_stated(tmp_path, capsys):
    assert run(tmp_path, BASE, BASE) == 0
    assert "tolerance 0.0001" in capsys.readouterr().out


def test_a_distance_within_the_tolerance_passes(tmp_path):
    near = changed([5, 7], [{"5": -0.5005, "9": -2.0}, -0.25])
    assert run(tmp_path, BASE, near, "--tolerance", "0.001") == 0
    assert run(tmp_path, BASE, near) == 1


@pytest.mark.parametrize(
    "other",
    [
        changed([5, 8], [-0.5, -0.25]),
        changed([5], [-0.5]),
        changed([5, 7], [-0.5, -0.35]),
        changed([5, 7], [-0.5, float("nan")]),
        changed([5, 7], [{"9": -2.0}, -0.25]),
        {"outputs": BASE["outputs"] * 2},
    ],
    ids=["token", "length", "logprob", "nan", "chosen token missing", "count"],
)
def test_any_difference_fails(tmp_path, other):
    assert run(tmp_path, BASE, other) == 1


def test_the_tail_of_a_top_k_table_may_differ(tmp_path):
    assert run(tmp_path, BASE, changed([5, 7], [{"5": -0.5, "11": -2.0}, -0.25])) == 0


def test_answers_of_the_completions_api_are_understood(tmp_path):
    def answer(second: float) -> dict[str, object]:
        logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, second]}
        return {"choices": [{"text": "ab", "logprobs": logprobs}]}

    assert run(tmp_path, answer(-1.0), answer(-1.0)) == 0
    assert run(tmp_path, answer(-1.0), answer(-1.1)) == 1


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"outputs": []},
        {"outputs": [3]},
        changed([], []),
        changed([1], []),
        {"choices": [{}]},
    ],
)
def test_a_file_without_outputs_never_passes(tmp_path, document):
    assert run(tmp_path, document, document) == 2


def test_a_missing_file_never_passes(tmp_path):
    assert main([str(tmp_path / "none.json"), str(tmp_path / "none.json")]) == 2
