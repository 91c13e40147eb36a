"""Calibration text becomes full rows of token ids, from the demo text or the user's own file."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from support.mxfp4 import write_tokenizer
from tokenizers import Tokenizer

from llmctl import errors
from llmctl.quantize.calibration import DEMO_DATASET, DEMO_TEXT, check_dataset, read_rows

TEXTS = [f"document {i}: the quick brown fox jumps over it\n" * 5 for i in range(8)]


def write_txt(path: Path) -> None:
    path.write_text("".join(TEXTS))


def write_jsonl(path: Path) -> None:
    # U+2028 ends a line for str.splitlines and not for JSON lines
    texts = [text + "\u2028" for text in TEXTS]
    path.write_text("\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts) + "\n\n")


def write_parquet(path: Path) -> None:
    table = pyarrow.table({"id": list(range(9)), "article": [*TEXTS, None]})
    pyarrow.parquet.write_table(table, path)


WRITERS = {".txt": write_txt, ".jsonl": write_jsonl, ".parquet": write_parquet}


@pytest.fixture
def rows(checkpoints: Callable[..., Path]) -> Callable[..., torch.Tensor]:
    def get(dataset: Path | str, **changes: Any) -> torch.Tensor:
        options = {"num_rows": 4, "row_length": 32, "vocab": 384, "seed": 0} | changes
        return read_rows(str(dataset), checkpoints() / "tokenizer.json", **options)

    return get


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_users_file_fills_every_row(
    rows: Callable[..., torch.Tensor],
    checkpoints: Callable[..., Path],
    tmp_path: Path,
    suffix: str,
) -> None:
    path = tmp_path / f"text{suffix}"
    WRITERS[suffix](path)
    found = rows(path)
    assert found.shape == (4, 32) and found.dtype == torch.int64
    tokenizer = Tokenizer.from_file(str(checkpoints() / "tokenizer.json"))
    text = tokenizer.decode(found.flatten().tolist())
    assert text[:30] in "".join(TEXTS)
    assert torch.equal(found, rows(path))


def test_the_demo_text_needs_no_file_and_follows_the_seed(
    rows: Callable[..., torch.Tensor],
) -> None:
    first = rows(DEMO_DATASET)
    assert torch.equal(first, rows(DEMO_DATASET))
    assert not torch.equal(first, rows(DEMO_DATASET, seed=1))
    assert len(first.unique()) > 10


def test_the_demo_text_is_the_same_with_every_python_and_every_llmctl(tmp_path: Path) -> None:
    """Another text gives the same checkpoint other scales, and a CI pipeline another engine."""
    write_tokenizer(tmp_path)  # bytes are tokens
    options = {"num_rows": 4000, "row_length": 512, "vocab": 256, "seed": 1234}
    found = read_rows(DEMO_DATASET, tmp_path / "tokenizer.json", **options)
    digest = hashlib.sha256(found.numpy().astype("<i8").tobytes()).hexdigest()
    assert digest == "dbabff83d60c61b71192f97804213f2879fee352a27bd6970264675a8bf382f4"


def test_the_default_rows_have_text_enough_where_a_token_has_eight_characters() -> None:
    with gzip.open(DEMO_TEXT, "rt", encoding="utf-8") as file:
        assert sum(len(json.loads(line)["text"]) for line in file) > 512 * 512 * 8


def test_an_installation_without_the_demo_text_says_so(
    rows: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("llmctl.quantize.calibration.DEMO_TEXT", tmp_path / "absent.jsonl.gz")
    with pytest.raises(errors.BadCalibrationData, match="--calib-dataset demo cannot be read"):
        rows(DEMO_DATASET)


def test_too_little_text_says_how_many_rows_it_gives(
    rows: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    (tmp_path / "x.txt").write_text("ab " * 100)
    with pytest.raises(errors.BadCalibrationData, match="need 32000") as caught:
        rows(tmp_path / "x.txt", num_rows=1000)
    count = int(caught.value.fix.removeprefix("--calib-size "))
    assert rows(tmp_path / "x.txt", num_rows=count).shape == (count, 32)
    (tmp_path / "x.txt").write_text("ab")
    with pytest.raises(errors.BadCalibrationData, match="need 32000") as caught:
        rows(tmp_path / "x.txt", num_rows=1000)
    assert "--calib-max-seq-length" in caught.value.fix, "a file of text is there already"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl", b'{"text": "a"}\n{"text": '),
        ("x.jsonl", b'{"prompt": "a"}'),
        ("x.jsonl", b'{"text": 3}'),
        ("x.jsonl", b"[1]"),
        ("x.parquet", b"PAR1 not really PAR1"),
        ("x.txt", b"\xff\xfe\xff"),
        ("x.txt", b""),
        ("x.csv", b"text\na"),
    ],
)
def test_unreadable_text_is_bad_calibration_data(
    rows: Callable[..., torch.Tensor], tmp_path: Path, name: str, data: bytes
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(errors.BadCalibrationData):
        rows(tmp_path / name)


def test_a_parquet_column_that_is_not_text_is_refused(
    rows: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "x.parquet")
    with pytest.raises(errors.BadCalibrationData, match="does not hold text"):
        rows(tmp_path / "x.parquet")


def test_a_hub_name_is_refused_because_nothing_is_downloaded() -> None:
    with pytest.raises(errors.BadCalibrationData, match="nothing is downloaded"):
        check_dataset("cnn_dailymail")


def test_a_tokenizer_of_another_model_is_refused(rows: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(errors.TokenizerError, match="vocabulary has 5"):
        rows(DEMO_DATASET, vocab=5)


def test_a_broken_tokenizer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(errors.TokenizerError, match="not a tokenizer"):
        read_rows(
            DEMO_DATASET, tmp_path / "tokenizer.json", num_rows=1, row_length=1, vocab=9, seed=0
        )
