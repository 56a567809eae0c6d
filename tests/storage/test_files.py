"""Files are written all or nothing, damage is found, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.testing import assert_close

from full_disk import full_after
from networks import mlp
from unmerge.errors import FileError
from unmerge.storage.files import load_weights, opened, read_tensors, replacing, write_json, write_tensors

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "n": torch.tensor(3)}
HEADER = {"samples": 3, "names": ["a", "b"], "nothing": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "one.safetensors"
    write_tensors(target, TENSORS, "test", HEADER)
    return target


def test_tensors_and_header_come_back(path):
    tensors, header = read_tensors(path, "test")
    assert_close(tensors, TENSORS, rtol=0, atol=0)
    assert header == HEADER


def test_views_and_shared_memory_are_written_as_values(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"all": base, "again": base, "turned": base.T, "row": base[1], "some": base[:, 2:4], "empty": base[:0]}
    write_tensors(tmp_path / "views.safetensors", tensors, "test", {})
    assert_close(read_tensors(tmp_path / "views.safetensors", "test")[0], tensors, rtol=0, atol=0)


def test_a_missing_file_and_a_directory_are_file_errors(tmp_path):
    for missing in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(FileError, match=str(missing)):
            read_tensors(missing, "test")


def test_what_stands_in_the_way_of_a_file_is_told_and_left(path, tmp_path):
    before = path.read_bytes()
    for target in (path / "two.safetensors", path / "deeper" / "two.safetensors"):
        with pytest.raises(FileError, match=r"one\.safetensors is a file; expected a folder"):
            write_tensors(target, TENSORS, "test", {})
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="folder is a folder; expected the name of a file"):
        write_tensors(tmp_path / "folder", TENSORS, "test", {})
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileError, match="link is a broken link; expected a folder"):
        write_tensors(tmp_path / "link" / "two.safetensors", TENSORS, "test", {})
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["folder", "link", "one.safetensors"]


def test_a_file_of_another_kind_says_what_it_is(path, tmp_path):
    with pytest.raises(FileError, match="not a file of edit: found test"):
        read_tensors(path, "edit")
    save_file(TENSORS, tmp_path / "foreign.safetensors")
    with pytest.raises(FileError, match="another program"):
        read_tensors(tmp_path / "foreign.safetensors", "test")


def test_every_truncation_is_a_file_error(path):
    raw = path.read_bytes()
    for length in {0, 1, 7, 8, 9, 100, *range(0, len(raw), 29), len(raw) - 1}:
        path.write_bytes(raw[:length])
        with pytest.raises(FileError, match=r"one\.safetensors"):
            read_tensors(path, "test")
    path.write_bytes(raw + b"\0")
    with pytest.raises(FileError):
        read_tensors(path, "test")


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_is_a_file_error_or_changes_nothing(path, place, bit):
    raw = bytearray(path.read_bytes())
    at = int(place * len(raw))
    original = bytes(raw)
    raw[at] ^= 1 << bit
    path.write_bytes(raw)
    try:
        tensors, header = read_tensors(path, "test")
    except FileError:
        return
    finally:
        path.write_bytes(original)
    # A space between two fields, or a field that nothing depends on.
    assert_close(tensors, TENSORS, rtol=0, atol=0)
    assert header == HEADER


def test_every_flipped_bit_of_the_tensors_is_found(path):
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    stored = sum(tensor.nbytes for tensor in TENSORS.values())
    for at in range(8 + size, 8 + size + stored, 5):
        flipped = bytearray(raw)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(FileError, match="checksum"):
            read_tensors(path, "test")


def tampered(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    """Change the metadata of a safetensors file, the tensors left as they are."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    fields = json.loads(raw[8 : 8 + size])
    change(fields["__metadata__"])
    changed = json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + raw[8 + size :])


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: metadata.update(header=metadata["header"].replace("3", "4")),
        lambda metadata: metadata.update(header="not json"),
        lambda metadata: metadata.update(checksums="{}"),
        lambda metadata: metadata.update(seal="0" * 64),
        lambda metadata: metadata.pop("seal"),
        lambda metadata: metadata.pop("header"),
        lambda metadata: metadata.pop("checksums"),
        lambda metadata: metadata.pop("unmerge"),
        lambda metadata: metadata.clear(),
    ],
    ids=["value", "no json", "checksums", "seal", "no seal", "no header", "no checksums", "no kind", "empty"],
)
def test_a_tampered_header_is_a_file_error(path, change):
    tampered(path, change)
    with pytest.raises(FileError, match=r"one\.safetensors"):
        read_tensors(path, "test")


def test_reading_to_a_device_that_is_not_there_is_not_called_damage(path):
    with pytest.raises(Exception, match=r"(?i)device") as raised:
        read_tensors(path, "test", device="nonsense")
    assert "damaged" not in str(raised.value)


# ---- all or nothing


def names_in(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_an_exception_while_writing_leaves_the_old_file_and_no_part(path):
    before = path.read_bytes()

    def broken() -> None:
        with replacing(path) as part:
            part.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert path.read_bytes() == before
    assert names_in(path.parent) == ["one.safetensors"]


def test_the_target_appears_only_at_the_end(tmp_path):
    target = tmp_path / "new.json"
    with replacing(target) as part:
        part.write_text("whole")
        assert not target.exists()
        assert part.parent.parent == target.parent
    assert target.read_text() == "whole"
    assert names_in(tmp_path) == ["new.json"]


def test_a_reader_of_the_old_file_goes_on_reading_it(path):
    before = path.read_bytes()
    with open(path, "rb") as reader:
        write_tensors(path, {"a": torch.zeros(50)}, "test", {})
        assert reader.read() == before
    assert path.read_bytes() != before


@pytest.mark.parametrize("read", [lambda path: read_tensors(path, "test")[0], load_weights])
def test_a_file_that_is_replaced_all_the_time_is_read_as_it_was_when_it_was_opened(path, read, monkeypatch):
    from_file, replaced = torch.UntypedStorage.from_file, []

    def opened_once_more(*arguments, **options):
        """As safetensors reads the data of a file whose header it has read."""
        write_tensors(path, {"a": torch.zeros(2000)}, "test", {})
        replaced.append(path.stat().st_size)
        return from_file(*arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", opened_once_more)
    assert_close(read(path), TENSORS, rtol=0, atol=0)
    assert len(replaced) == 1
    monkeypatch.undo()
    assert_close(read(path), {"a": torch.zeros(2000)}, rtol=0, atol=0)


def test_an_open_file_is_read_to_its_end_when_its_name_is_gone(path):
    with opened(path) as (file, _):
        path.unlink()
        assert_close(file.get_tensor("a"), TENSORS["a"], rtol=0, atol=0)


def test_a_disk_that_is_full_leaves_the_old_file(path):
    before = path.read_bytes()
    big = {"a": torch.zeros(100_000)}
    with pytest.raises((FileError, OSError)), full_after(10_000):
        write_tensors(path, big, "test", HEADER)
    with pytest.raises(OSError, match="large"), full_after(10_000):
        write_json(path, "x" * 20_000)
    assert path.read_bytes() == before
    assert names_in(path.parent) == ["one.safetensors"]


def test_an_error_without_a_number_of_the_system_keeps_its_words(tmp_path):
    with pytest.raises(OSError, match=r"^the disk is gone$"), replacing(tmp_path / "new"):
        raise OSError("the disk is gone")


def test_a_header_that_is_no_json_leaves_the_old_file(path):
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_tensors(path, TENSORS, "test", {"model": mlp()})
    assert path.read_bytes() == before
    assert names_in(path.parent) == ["one.safetensors"]


def test_written_files_have_the_usual_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "one.json", {})
        write_tensors(tmp_path / "one.safetensors", TENSORS, "test", {})
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    for name in ("one.json", "one.safetensors"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


# ---- checkpoints of others


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("name", ["model.pt", "model.bin", "model.pkl", "model.safetensors", "model"])
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_nothing_is_unpickled(tmp_path, name, how):
    path, trace = tmp_path / name, tmp_path / "executed"
    value = {"0.weight": torch.zeros(2, 2), "bomb": Bomb(trace)}
    if how == "pickle":
        path.write_bytes(pickle.dumps(value))
    else:
        torch.save(value, path)
    with pytest.raises(FileError, match=name):
        load_weights(path)
    assert not trace.exists()


def test_state_dicts_are_read_from_safetensors_and_torch_files(tmp_path):
    state = mlp().state_dict()
    save_file(state, tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "model.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "wrapped.pt")
    for name in ("model.safetensors", "model.pt", "wrapped.pt"):
        assert_close(load_weights(tmp_path / name), dict(state), rtol=0, atol=0)


@pytest.mark.parametrize("value", [[torch.zeros(2)], {"epoch": 3}, torch.zeros(3), {"model": {"a": torch.zeros(1)}}])
def test_a_file_that_holds_no_state_dict_is_refused(tmp_path, value):
    torch.save(value, tmp_path / "model.pt")
    with pytest.raises(FileError, match=r"model\.pt.*expected a state dict"):
        load_weights(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_missing_and_empty_checkpoints_are_file_errors(tmp_path, name):
    with pytest.raises(FileError, match="no file"):
        load_weights(tmp_path / name)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(FileError, match=name):
        load_weights(tmp_path / name)
