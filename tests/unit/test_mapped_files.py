"""Weights leave mapped files without a second copy in memory."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from batchjobs.errors import UsageError
from workers.engine import mapped_files
from workers.engine.mapped_files import SMAPS, own_memory

FLOATS = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each weight is copied")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights of a model.bin"
    path.write_bytes(torch.arange(FLOATS, dtype=torch.float32).numpy().tobytes())
    return path


def mapped(file: Path) -> torch.Tensor:
    """The file's floats, mapped as safetensors maps them."""
    storage = torch.UntypedStorage.from_file(str(file), False, FLOATS * 4)
    return torch.tensor([], dtype=torch.float32).set_(storage)  # type: ignore[call-overload]


def resident(file: Path) -> int:
    """KiB of the mapped file that are in memory."""
    found = re.search(rf"{re.escape(str(file))}\n.*?\nRss: +(\d+) kB", SMAPS.read_text(), re.DOTALL)
    assert found is not None
    return int(found[1])


def test_weights_are_read_without_a_look_at_the_mapped_pages(file: Path) -> None:
    whole = mapped(file)
    weights = [whole[:10_000].view(100, 100), whole[500_000:700_000], whole[-3:], whole[7]]
    own_memory(weights)
    assert resident(file) == 0
    assert torch.equal(weights[0], torch.arange(10_000.0).view(100, 100))
    assert torch.equal(weights[1], torch.arange(500_000.0, 700_000.0))
    assert torch.equal(weights[2], torch.arange(FLOATS - 3.0, FLOATS))
    assert weights[3].shape == ()
    assert weights[3] == 7
    assert whole[7] == 7
    assert resident(file) > 0, "the measure would see it"


def test_who_writes_into_the_file_later_writes_into_no_weight(file: Path) -> None:
    weights = [mapped(file), mapped(file)[:1000].view(10, 100).T, mapped(file)[100:200].view(torch.bfloat16)]
    before = [weight.clone() for weight in weights]
    own_memory(weights)
    with file.open("r+b") as stream:
        stream.write(b"\xff" * FLOATS)
    assert all(torch.equal(now, then) for now, then in zip(weights, before, strict=True))
    assert not torch.equal(mapped(file), before[0]), "the file has changed"


def test_what_was_written_over_a_mapped_weight_stays(file: Path) -> None:
    weight = mapped(file)
    weight[5] = -1
    own_memory([weight])
    assert weight[5] == -1
    assert weight[6] == 6


def test_another_file_in_its_place_is_not_read(file: Path, tmp_path: Path) -> None:
    weight = mapped(file)
    (tmp_path / "other").write_bytes(bytes(FLOATS * 4))
    os.replace(tmp_path / "other", file)
    own_memory([weight])
    assert weight[-1] == FLOATS - 1


def test_a_file_that_was_cut_off_is_said(file: Path) -> None:
    weight = mapped(file)
    os.truncate(file, FLOATS)
    with pytest.raises(UsageError, match="was cut off while it was read"):
        own_memory([weight])


def test_weights_with_memory_of_their_own_stay_where_they_are(file: Path) -> None:
    own, whole = torch.ones(10), torch.zeros(100)
    part, place = whole[:50], own.data_ptr()
    own_memory([own, part, torch.zeros(0)])
    assert own.data_ptr() == place
    whole.fill_(1)
    assert not part.any()


def test_without_a_list_of_mappings_each_weight_is_copied(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mapped_files, "SMAPS", tmp_path / "none")
    weight = mapped(file)
    own_memory([weight])
    file.write_bytes(bytes(FLOATS * 4))
    assert weight[-1] == FLOATS - 1
