"""A child of test_real_registry.py: TensorRT-RTX's registry and parser with a plugin library.

    python registry_child.py LIBRARY creators
    python registry_child.py LIBRARY parse MODEL...

prints one JSON object a line: what the registry or the parser did. TensorRT-RTX runs no plugins and
ends the process when one that the parser created becomes a layer, so the last MODEL may end it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tensorrt_rtx_bindings as trt


class Logger(trt.ILogger):
    def __init__(self) -> None:
        super().__init__()

    def log(self, severity: object, message: str) -> None:
        print(json.dumps({"log": message}), flush=True)


def main() -> None:
    logger = Logger()
    builder = trt.Builder(logger)
    registry = builder.get_plugin_registry()
    before = {(c.plugin_namespace, c.name) for c in registry.all_creators}
    registry.load_library(sys.argv[1])
    if sys.argv[2] == "creators":
        for creator in registry.all_creators:
            if (creator.plugin_namespace, creator.name) not in before:
                fields = [field.name for field in creator.field_names]
                name = [creator.plugin_namespace, creator.name, creator.plugin_version]
                print(json.dumps({"creator": name, "fields": fields}), flush=True)
    for model in sys.argv[3:]:
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, logger)
        parsed = parser.parse(Path(model).read_bytes())
        print(json.dumps({"model": model, "parsed": parsed}), flush=True)


main()
