"""The bundle: the folder that `edgepool export` delivers and every later command takes.

    manifest.json        what is in it: see `MANIFEST_KEYS`
    model.onnx           the portable graph (weights inside, or beside it in model.onnx.data)
    model.PRECISION.onnx the same in another precision, where one was made (`GRAPHS`)
    tokenizer.json       as the checkpoint had it
    reference.json       what PyTorch computed, for every later gate to compare with
    variants/TARGET/     the same graph lowered for one target

A bundle may come from anywhere: nothing in it is executed, and every path that it names has to stay
inside it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, List, Optional, Union

from .config import ModelConfig
from .errors import BadInput
from .files import confined, new_file, new_folder, sha256
from .onnxfile import external_locations
from .progress import Report, silent

FORMAT, VERSION = "edgepool-bundle", 1
DEFAULT = "edgepool-bundle"
MANIFEST = "manifest.json"
MODEL = "model.onnx"  # the graph in the bundle's own float type
# Graphs by precision, in the folder of a variant too. The bundle's own precision has MODEL.
GRAPHS = {"fp32": MODEL, "fp16": "model.fp16.onnx", "int8": "model.int8.onnx"}
ENGINES = "engines"  # folder of `edgepool build-engine`
LARGEST_MANIFEST = 64 << 20

# key: what it holds
MANIFEST_KEYS = {
    "format": "edgepool-bundle",
    "version": "of the format",
    "edgepool": "version of edgepool that wrote it",
    "config": "the model's configuration (ModelConfig)",
    "source_digest": "sha256 of the model.pt it was exported from",
    "opset": "ONNX opset of model.onnx",
    "dtype": "fp32 or fp16: the graph's own float type",
    "functions": "form of the function bodies in model.onnx",
    "files": "path: {sha256, bytes} of every file but the manifest",
    "variants": "target: {model, opset, ir_version, functions}",
    "quantization": "null, or what `edgepool quantize` recorded",
    "reference": "path of the reference outputs, or null",
    "parity": "how far ONNX Runtime was from PyTorch at export, or null",
    "digest": "sha256 of this manifest without `digest`, see `manifest_digest`",
}


class Bundle:
    """An opened bundle: its manifest is read and checked, its files are there.

    path, manifest (a dictionary, see MANIFEST_KEYS) and config (ModelConfig) are plain attributes.
    """

    def __init__(self, path: Path, manifest: Dict[str, Any], config: ModelConfig):
        self.path = path
        self.manifest = manifest
        self.config = config

    @classmethod
    def open(cls, path: Union[str, Path]) -> Bundle:
        """Read and check a bundle; cheap, it hashes only the manifest (see `verify`).

        Raises BadInput for a folder that is no bundle or of an unknown version, for a changed
        manifest, a missing file, a file of another size, and paths that lead out of the folder.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if manifest["digest"] != manifest_digest(manifest):
            raise BadInput(
                "%s: its digest is not the one it states: the file was changed or damaged; "
                "copy the bundle again or export it anew" % (path / MANIFEST)
            )
        try:
            config = ModelConfig.from_dict(manifest["config"])
        except BadInput as error:
            raise BadInput("%s: %s" % (path / MANIFEST, error)) from error
        bundle = cls(path, manifest, config)
        for name, record in manifest["files"].items():
            size = bundle.file(name).stat().st_size
            if size != record["bytes"]:
                raise BadInput(
                    "%s: %d bytes, the manifest says %d: copy the bundle again or export it anew"
                    % (path / name, size, record["bytes"])
                )
            if name.endswith(".onnx"):
                for used in bundle.graph_files(name):
                    bundle.file(used)
        bundle.file(MODEL)
        for variant in manifest["variants"].values():
            bundle.file(variant["model"])
        if manifest["reference"] is not None:
            bundle.file(manifest["reference"])
        return bundle

    @property
    def model_path(self) -> Path:
        """The portable model.onnx."""
        return self.path / MODEL

    @property
    def tokenizer_path(self) -> Optional[Path]:
        """tokenizer.json, or None where the checkpoint had none."""
        return self.path / "tokenizer.json" if "tokenizer.json" in self.manifest["files"] else None

    def variant_path(self, target: str) -> Path:
        """The graph lowered for `target`; raises BadInput where the bundle has none."""
        if target not in self.manifest["variants"]:
            there = ", ".join(self.manifest["variants"]) or "none"
            raise BadInput(
                "%s: no variant for %s (it has %s): export again with --target %s"
                % (self.path, target, there, target)
            )
        return self.file(self.manifest["variants"][target]["model"])

    def config_of(self, precision: str) -> ModelConfig:
        """The configuration of the graphs of a precision: with INT8, the pages may be INT8 too."""
        quantization = self.manifest["quantization"]
        if precision != "int8" or quantization is None:
            return self.config
        return dataclasses.replace(self.config, kv_dtype=quantization.get("kv_dtype"))

    def reference(self) -> Dict[str, Any]:
        """The recorded PyTorch outputs (edgepool.exporter.reference says what they hold)."""
        name = self.manifest["reference"]
        if name is None:
            raise BadInput("%s: it records no reference outputs: export it anew" % self.path)
        return _read_json(self.file(name))

    def file(self, name: str) -> Path:
        """The path of a file that the manifest lists; raises BadInput if it is not inside."""
        if name not in self.manifest["files"]:
            raise BadInput("%s: the manifest does not list '%s'" % (self.path, name))
        return confined(self.path, name)

    def graph_files(self, name: str) -> List[str]:
        """The names of a graph and of the files that it takes weights from.

        Raises BadInput for a file that is missing, or not below the graph's folder.
        """
        graph = self.file(name)
        locations = sorted(external_locations(str(graph)))
        used = [confined(graph.parent, location) for location in locations]
        return [name, *(file.relative_to(self.path).as_posix() for file in used)]

    def verify(self, report: Report = silent) -> None:
        """Compare the sha256 of every file; raises BadInput that names the first difference."""
        report("verifying the bundle", 0, 1)
        for name in self.manifest["files"]:
            self.check_digest(name, sha256(self.file(name)))
        report("verifying the bundle", 1, 1)

    def check_digest(self, name: str, digest: str) -> None:
        """Raise BadInput where a file's sha256 is not the one in the manifest."""
        if self.manifest["files"][name]["sha256"] != digest:
            raise BadInput(
                "%s: its sha256 is not the one in the manifest: "
                "the file was changed or damaged; copy the bundle again or export it anew"
                % (self.path / name)
            )


def read_manifest(path: Path) -> Dict[str, Any]:
    """The manifest of a bundle: format, version and the type of every value checked.

    Raises BadInput. The configuration and the digest are left to `Bundle.open`.
    """
    if not path.exists():
        raise BadInput("%s: no such bundle: `edgepool export model.pt` makes one" % path)
    if not path.is_dir():
        raise BadInput("%s: a bundle is a folder, and this is not one" % path)
    file = path / MANIFEST
    if not file.is_file():
        raise BadInput("%s: not a bundle: it has no %s" % (path, MANIFEST))
    manifest = _read_json(file)
    if manifest.get("format") != FORMAT:
        raise BadInput("%s: not a bundle's manifest" % file)
    if manifest.get("version") != VERSION:
        raise BadInput(
            "%s: version %r of the format; this edgepool reads version %d"
            % (file, manifest.get("version"), VERSION)
        )
    for key in MANIFEST_KEYS:
        if key not in manifest:
            raise BadInput("%s: key '%s' is missing" % (file, key))
    for key, is_right in _VALUES.items():
        if not is_right(manifest[key]):
            raise BadInput("%s: '%s' does not hold %s" % (file, key, MANIFEST_KEYS[key]))
    return manifest


def write_manifest(folder: Path, manifest: Dict[str, Any]) -> None:
    """Write manifest.json: its digest, and sha256 and size of every file now in the folder.

    Engines have records of their own, and are built, changed and deleted without it.
    """
    with new_file(folder / MANIFEST) as stream:
        mine = (folder / MANIFEST, Path(stream.name))
        paths = [
            path
            for path in folder.rglob("*")
            if path.is_file() and path not in mine and folder / ENGINES not in path.parents
        ]
        files = {
            str(path.relative_to(folder)).replace(os.sep, "/"): {
                "sha256": sha256(path),
                "bytes": path.stat().st_size,
            }
            for path in paths
        }
        stream.write(manifest_bytes(manifest, files))


def manifest_bytes(manifest: Dict[str, Any], files: Dict[str, Any]) -> bytes:
    """The content of manifest.json, with `files` (see MANIFEST_KEYS) and the digest."""
    manifest = {**manifest, "files": files}
    manifest["digest"] = manifest_digest(manifest)
    text = json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False)
    return text.encode("utf-8") + b"\n"


def manifest_digest(manifest: Dict[str, Any]) -> str:
    """Hex sha256 of a manifest's values: its JSON without `digest`, spaces and unsorted keys."""
    values = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(
        json.dumps(values, sort_keys=True, separators=(",", ":")).encode("ascii")
    ).hexdigest()


# ----------------------------------------------------------------------------------- staging

# Folders of a bundle that later commands fill: replaced with it, their files need not be listed.
DERIVED = (ENGINES, "variants")


def staged(path: Union[str, Path]) -> ContextManager[Path]:
    """A new folder that takes the place of `path` when the block ends well (`files.new_folder`).

    Only a bundle or an empty folder is replaced, and only if the bundle holds nothing but what its
    manifest lists and what is DERIVED from it. Raises BadInput for other folders, for a path that
    cannot be written, and when the disk is full.
    """
    path = Path(os.path.abspath(str(path)))
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise BadInput("%s: it exists and is not a folder: choose another output" % path)
    if path.is_dir() and any(path.iterdir()):
        _check_replaceable(path)
    return new_folder(path)


def _check_replaceable(path: Path) -> None:
    """Raise BadInput unless the folder is a bundle (of any version) with no other file in it."""
    try:
        manifest = _read_json(path / MANIFEST)
    except BadInput:
        manifest = {}
    if manifest.get("format") != FORMAT:
        raise BadInput("%s: the folder is not empty and not a bundle: choose another output" % path)
    listed = manifest.get("files")
    for folder, folders, names in os.walk(str(path)):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in sorted(names + links):
            relative = os.path.relpath(os.path.join(folder, name), str(path))
            if relative.split(os.sep)[0] in DERIVED or relative == MANIFEST:
                continue
            if not isinstance(listed, dict) or relative.replace(os.sep, "/") not in listed:
                raise BadInput(
                    "%s: it would be deleted, and no bundle's manifest lists it: "
                    "move it, or choose another output" % (path / relative)
                )


# ----------------------------------------------------------------------------------- reading


def _read_json(path: Path) -> Dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_MANIFEST:
            raise BadInput("%s: too large" % path)
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput("%s: cannot be read: %s" % (path, error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise BadInput("%s: not JSON: the file is damaged" % path) from error
    if not isinstance(value, dict):
        raise BadInput("%s: not a JSON object" % path)
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_table(value: Any, **entries: Callable[[Any], bool]) -> bool:
    """Whether a value is a table, and every one of its values a table with these entries."""
    return isinstance(value, dict) and all(
        isinstance(row, dict) and all(name in row and ok(row[name]) for name, ok in entries.items())
        for row in value.values()
    )


def _is_graph(value: Any) -> bool:
    return _is_text(value) and value.endswith(".onnx")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# The values whose type nothing else checks: in MANIFEST_KEYS' words, what they have to be.
_VALUES: Dict[str, Callable[[Any], bool]] = {
    "edgepool": _is_text,
    "source_digest": _is_text,
    "opset": _is_count,
    "dtype": lambda value: value in ("fp32", "fp16"),
    "functions": _is_text,
    "files": lambda value: _is_table(value, sha256=_is_text, bytes=_is_count),
    "variants": lambda value: _is_table(
        value, model=_is_graph, opset=_is_count, ir_version=_is_count, functions=_is_text
    ),
    "quantization": lambda value: value is None or isinstance(value, dict),
    "reference": lambda value: value is None or _is_text(value),
    "parity": lambda value: value is None or _is_table(value, max_logit_difference=_is_number),
}
