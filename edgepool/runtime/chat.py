"""Chat templates: the Jinja program that came with a model, run as what it is, foreign code.

It is rendered in Jinja's immutable sandbox, in a child process of its own with limits on time,
memory and output. A sandbox alone cannot stop an endless loop or `10 ** 10 ** 9`, nor can a thread
or a trace function: only a process can be ended whatever it is doing. It costs the start of an
interpreter, about 0.2 s, once per rendered conversation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Dict, Optional, Sequence

from ..errors import BadInput

TIME_LIMIT = 10.0  # seconds, with the start of the child
MEMORY_LIMIT = 1 << 30  # bytes of address space
OUTPUT_LIMIT = 4 << 20  # characters, a million tokens
TEMPLATE_LIMIT = 1 << 20  # characters

# The child is isolated (-I) from the environment and the working folder, but has to find Jinja
# where this process does: in a user's site-packages, say, or on PYTHONPATH.
CHILD = """\
import runpy, sys
sys.path[:] = sys.argv[2:]
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def render(
    template: str,
    messages: Sequence[Dict[str, str]],
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    time_limit: float = TIME_LIMIT,
) -> str:
    """The prompt for a conversation: messages are {"role": ..., "content": ...} in order.

    The names a template sees are those of transformers' apply_chat_template. Raises BadInput with
    one line if the template is faulty, refuses the messages, or exceeds a limit.
    """
    if len(template) > TEMPLATE_LIMIT:
        raise BadInput("chat template: longer than %d characters" % TEMPLATE_LIMIT)
    request = {
        "template": template,
        "output_limit": OUTPUT_LIMIT,
        "memory_limit": MEMORY_LIMIT,
        "context": {
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "add_generation_prompt": add_generation_prompt,
        },
    }
    worker = Path(__file__).with_name("chat_worker.py")
    search = [folder for folder in sys.path if os.path.isabs(folder)]
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-c", CHILD, str(worker), *search],
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=time_limit,
        )
    except subprocess.TimeoutExpired as error:
        raise BadInput("chat template: not rendered after %g s, stopped" % time_limit) from error
    answer = _answer(child.stdout)
    if answer is None:
        last = child.stderr.decode(errors="replace").strip().split("\n")[-1]
        raise BadInput(
            "chat template: rendering ended with %d: %s" % (child.returncode, last[:200])
        )
    if "error" in answer:
        raise BadInput("chat template: %s" % answer["error"])
    return answer["text"]


def _answer(output: bytes) -> Optional[Dict[str, str]]:
    try:
        return json.loads(output.decode())
    except ValueError:
        return None
