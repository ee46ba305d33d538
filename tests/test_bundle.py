"""Bundles: staged writing, and everything that opening one refuses."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgepool import bundle, files
from edgepool.bundle import Bundle, staged
from edgepool.config import ModelConfig
from edgepool.errors import BadInput
from edgepool.onnxfile import external_reference, header

CONFIG = ModelConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=8, max_context=64,
)  # fmt: skip

VARIANT = {"model": "variants/l4/model.onnx", "opset": 20, "ir_version": 9, "functions": "auto"}


def onnx_bytes(external: str = "") -> bytes:
    """A model with one initialiser, inside or in the file `external`."""
    data = external_reference(external, 0, 16) if external else header(9, 16) + bytes(16)
    tensor = b"\x08\x04\x10\x01" + header(8, 1) + b"w" + data  # dims [4], float, name w
    graph = header(5, len(tensor)) + tensor
    return b"\x08\x09" + header(7, len(graph)) + graph


def write_bundle(path: Path, external: str = "", **changes: object) -> Path:
    with staged(path) as folder:
        (folder / "model.onnx").write_bytes(onnx_bytes(external))
        (folder / "tokenizer.json").write_text("{}")
        (folder / "variants" / "l4").mkdir(parents=True)
        (folder / "variants" / "l4" / "model.onnx").write_bytes(onnx_bytes())
        if external and "/" not in external:
            (folder / external).write_bytes(bytes(16))
        manifest = {
            "format": bundle.FORMAT,
            "version": bundle.VERSION,
            "edgepool": "0.1",
            "config": CONFIG.to_dict(),
            "source_digest": "0" * 64,
            "opset": 20,
            "dtype": "fp32",
            "functions": "auto",
            "variants": {"l4": VARIANT},
            "quantization": None,
            "reference": None,
            "parity": {"model.onnx": {"max_logit_difference": 1e-5}},
        }
        assert {*manifest, "files", "digest"} == set(bundle.MANIFEST_KEYS)
        bundle.write_manifest(folder, {**manifest, **changes})
    return path


def edit(path: Path, **changes: object) -> None:
    """Change the manifest as somebody would who knows the format, its digest included."""
    file = path / "manifest.json"
    manifest = {**json.loads(file.read_text()), **changes}
    manifest["digest"] = bundle.manifest_digest(manifest)
    file.write_text(json.dumps(manifest))


def refused(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        Bundle.open(path).verify()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------ opening


def test_open(tmp_path: Path) -> None:
    opened = Bundle.open(write_bundle(tmp_path / "b"))
    opened.verify()
    assert opened.config == CONFIG
    assert opened.model_path == tmp_path / "b" / "model.onnx"
    assert opened.tokenizer_path == tmp_path / "b" / "tokenizer.json"
    assert opened.variant_path("l4").read_bytes() == onnx_bytes()
    with pytest.raises(BadInput, match="no variant for a100"):
        opened.variant_path("a100")
    with pytest.raises(BadInput, match="records no reference"):
        opened.reference()


def test_what_is_no_bundle(tmp_path: Path) -> None:
    assert "no such bundle" in refused(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    assert "is a folder" in refused(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "no manifest.json" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "manifest.json").write_text("[" * 100_000)
    assert "not JSON" in refused(tmp_path / "empty")
    (tmp_path / "empty" / "manifest.json").write_bytes(b"\xff\xfe")
    assert "not JSON" in refused(tmp_path / "empty")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "other"}, "not a bundle's manifest"),
        ({"version": 2}, "version 2 of the format; this edgepool reads version 1"),
        ({"config": {"vocab_size": 1}}, "key 'hidden_size' is missing"),
        ({"config": []}, "expected a table"),
        ({"variants": []}, "'variants' does not hold target: {model, opset, ir_version"),
        ({"variants": {"x": 1}}, "'variants' does not hold"),
        ({"variants": {"x": {**VARIANT, "opset": "20"}}}, "'variants' does not hold"),
        ({"variants": {"x": {**VARIANT, "model": "tokenizer.json"}}}, "'variants' does not hold"),
        ({"variants": {"x": {**VARIANT, "model": "y.onnx"}}}, "does not list 'y.onnx'"),
        ({"files": {"model.onnx": 3}}, "'files' does not hold path: {sha256, bytes}"),
        ({"files": {"model.onnx": {"sha256": "", "bytes": True}}}, "'files' does not hold"),
        ({"dtype": 5}, "'dtype' does not hold fp32 or fp16"),
        ({"reference": {}}, "'reference' does not hold path of the reference outputs, or null"),
        ({"reference": "gone"}, "does not list 'gone'"),
        ({"parity": 1}, "'parity' does not hold"),
        ({"parity": {"model.onnx": {}}}, "'parity' does not hold"),
        ({"quantization": 1}, "'quantization' does not hold"),
        ({"edgepool": None}, "'edgepool' does not hold"),
        ({"source_digest": 1}, "'source_digest' does not hold"),
        ({"opset": 20.5}, "'opset' does not hold"),
        ({"functions": []}, "'functions' does not hold"),
        ({"files": {}}, "does not list 'model.onnx'"),
        ({"files": {"../x": {"sha256": "", "bytes": 1}}}, "leads out of the folder"),
        ({"files": {"/etc/passwd": {"sha256": "", "bytes": 1}}}, "leads out of the folder"),
        ({"files": {"..\\x": {"sha256": "", "bytes": 1}}}, "leads out of the folder"),
        ({"files": {"": {"sha256": "", "bytes": 1}}}, "leads out of the folder"),
        ({"files": {"a\0b": {"sha256": "", "bytes": 1}}}, "is no name for a file"),
        ({"files": {"\ud800": {"sha256": "", "bytes": 1}}}, "is no name for a file"),
        ({"files": {"x" * 300: {"sha256": "", "bytes": 1}}}, "the file is missing"),
        ({"files": {"gone": {"sha256": "", "bytes": 1}}}, "the file is missing"),
    ],
)
def test_bad_manifests(changes: dict, says: str, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b")
    edit(path, **changes)
    assert says in refused(path)


@pytest.mark.parametrize("key", sorted(bundle.MANIFEST_KEYS))
def test_every_key_is_needed(key: str, tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b")
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest[key]
    (path / "manifest.json").write_text(json.dumps(manifest))
    refused(path)


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b")
    outside = tmp_path / "outside"
    outside.write_bytes((path / "model.onnx").read_bytes())
    (path / "model.onnx").unlink()
    (path / "model.onnx").symlink_to(outside)
    assert "a link out of the folder" in refused(path)


def flipped(file: Path) -> Iterator[tuple[bytes, int, bytes]]:
    """(content, position, damaged): the file with one bit flipped in each byte in turn."""
    content = file.read_bytes()
    with open(file, "r+b", buffering=0) as stream:  # a tenth of the time of writing it anew
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= 1 << position % 8
            os.pwrite(stream.fileno(), damaged[position : position + 1], position)
            yield content, position, bytes(damaged)
            os.pwrite(stream.fileno(), content[position : position + 1], position)


def reads_the_same(content: bytes, damaged: bytes) -> bool:
    try:
        return json.loads(content) == json.loads(damaged)
    except ValueError:
        return False


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b")
    for file in ("model.onnx", "tokenizer.json", "variants/l4/model.onnx"):
        for _, position, _ in flipped(path / file):
            assert file in refused(path), position
    Bundle.open(path).verify()
    for content, position, damaged in flipped(path / "manifest.json"):
        # 1e-05 and 1E-05 are one number: only what changes a value has to be found.
        if not reads_the_same(content, damaged):
            assert "manifest.json" in refused(path), position
    Bundle.open(path).verify()
    (path / "tokenizer.json").write_text("{ }")
    assert "3 bytes, the manifest says 2" in refused(path)


def test_external_data_stays_inside(tmp_path: Path) -> None:
    Bundle.open(write_bundle(tmp_path / "good", external="model.onnx.data")).verify()
    (tmp_path / "secret").write_bytes(bytes(16))
    assert "leads out of the folder" in refused(write_bundle(tmp_path / "b", external="../secret"))
    assert "leads out" in refused(write_bundle(tmp_path / "c", external=str(tmp_path / "secret")))
    path = write_bundle(tmp_path / "d", external="model.onnx.data")
    edit(
        path,
        files={k: v for k, v in Bundle.open(path).manifest["files"].items() if "data" not in k},
    )
    assert "does not list 'model.onnx.data'" in refused(path)


# ------------------------------------------------------------------------------------ staging


def test_a_failed_block_changes_nothing(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b")
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(ZeroDivisionError), staged(path) as folder:
        (folder / "half").write_text("x")
        raise ZeroDivisionError
    assert (path / "manifest.json").read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_bundle_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b")
    (path / "engines").mkdir()
    (path / "engines" / "old").write_text("of the old graph")
    with staged(path) as folder:
        (folder / "new").write_text("x")
    assert [p.name for p in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_without_the_kernel_s_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise OSError("no libc")

    path = write_bundle(tmp_path / "b")
    monkeypatch.setattr(files.ctypes, "CDLL", missing)
    with staged(path) as folder:
        (folder / "new").write_text("x")
    assert [p.name for p in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_bundle_comes_back_if_the_new_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise OSError("no libc")

    def rename(source: str, target: str) -> None:
        if target == str(path) and source.endswith(".tmp"):
            raise PermissionError(errno.EACCES, "denied", source)
        os.replace(source, target)

    path = write_bundle(tmp_path / "b")
    monkeypatch.setattr(files.ctypes, "CDLL", missing)
    monkeypatch.setattr(files.os, "rename", rename)
    with pytest.raises(BadInput, match="cannot be written"), staged(path) as folder:
        (folder / "new").write_text("x")
    Bundle.open(path).verify()
    assert list(tmp_path.iterdir()) == [path]


def test_all_is_on_the_disk_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is synced, by the number that survives a rename, and where the bundle was just then."""
    path = write_bundle(tmp_path / "b")
    synced = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, (path / "new").exists()))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", record)
    with staged(path) as folder:
        (folder / "new" / "deep").mkdir(parents=True)
        (folder / "new" / "deep" / "file").write_text("x")
    new = [path, path / "new", path / "new" / "deep", path / "new" / "deep" / "file"]
    assert {inode for inode, there in synced if not there} == {p.stat().st_ino for p in new}
    assert [inode for inode, there in synced if there] == [tmp_path.stat().st_ino]


@pytest.mark.parametrize(
    "name", ["notes.txt", "variants.txt", "sub/notes.txt", "sub/manifest.json"]
)
def test_a_file_that_the_manifest_does_not_list_is_not_deleted(tmp_path: Path, name: str) -> None:
    path = write_bundle(tmp_path / "b")
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("mine")
    with pytest.raises(BadInput, match=r"b/%s: it would be deleted" % name), staged(path):
        pass
    assert (path / name).read_text() == "mine"
    Bundle.open(path).verify()


def test_a_linked_folder_is_not_deleted(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "b")
    (path / "photos").symlink_to(tmp_path)
    with pytest.raises(BadInput, match="photos: it would be deleted"), staged(path):
        pass


def test_bundles_that_cannot_be_opened_are_replaced(tmp_path: Path) -> None:
    """A damaged one, or one of another version: writing it anew is what the message advises."""
    path = write_bundle(tmp_path / "b")
    edit(path, version=0, dtype=5)
    (path / "model.onnx").write_bytes(b"damaged")
    Bundle.open(write_bundle(path)).verify()


def test_only_bundles_and_empty_folders_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").write_text("x")
    with pytest.raises(BadInput, match="not empty and not a bundle"), staged(tmp_path / "photos"):
        pass
    assert (tmp_path / "photos" / "cat").read_text() == "x"
    (tmp_path / "empty").mkdir()
    with staged(tmp_path / "empty") as folder:
        (folder / "new").write_text("x")
    assert (tmp_path / "empty" / "new").exists()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(BadInput, match="not a folder"), staged(tmp_path / "link"):
        pass


def test_what_killed_exports_left_is_removed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    dead = tmp_path / (".b.%d.tmp" % process.pid)
    alive = tmp_path / (".b.%d.tmp" % os.getppid())
    other = tmp_path / ".b.notes.tmp"
    for folder in (dead, alive, other):
        folder.mkdir()
    with staged(tmp_path / "b"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["b", alive.name, other.name])


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no space left"), staged(tmp_path / "b") as folder:
        (folder / "full").symlink_to("/dev/full")
        (folder / "full").write_bytes(b"x")
    assert not list(tmp_path.iterdir())
