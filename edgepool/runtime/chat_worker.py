"""The child process of `chat`: reads a request from stdin, renders it, answers on stdout, as JSON.

It is run by its path in an isolated interpreter, so it imports nothing of edgepool.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
from typing import Any, Dict, List

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Any) -> List[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body, lineno=line)]


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def to_json(value: Any, **options: Any) -> str:
    """JSON as transformers writes it: unescaped, unlike Jinja's own filter, which is for HTML."""
    return json.dumps(value, **dict({"ensure_ascii": False}, **options))


def rendered(template: str, context: Dict[str, Any], output_limit: int) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    pieces, length = [], 0
    for piece in environment.from_string(template).generate(**context):
        length += len(piece)
        if length > output_limit:
            raise jinja2.TemplateError("its output is longer than %d characters" % output_limit)
        pieces.append(piece)
    return "".join(pieces)


def main() -> None:
    request = json.loads(sys.stdin.buffer.read().decode())
    limit = request["memory_limit"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        text = rendered(request["template"], request["context"], request["output_limit"])
        answer = {"text": text}
    except MemoryError:
        answer = {"error": "it needs more than %d MiB of memory" % (limit >> 20)}
    except Exception as error:  # noqa: BLE001 - a foreign program may raise anything
        lines = str(error).split("\n")
        answer = {"error": "%s: %s" % (type(error).__name__, lines[0][:200])}
    sys.stdout.buffer.write(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
