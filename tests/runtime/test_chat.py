"""Chat templates: the text of transformers, and limits that hold."""

from __future__ import annotations

import sys
import time
import venv
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from edgepool.errors import BadInput
from edgepool.runtime import chat

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
FEATURES = """
{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- if tools is not none %}tools{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('roles must be known') }}
    {%- endif %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- generation %}{{ message.content | trim | tojson }}{%- endgeneration %}
    {{ eos_token }}
{%- endfor %}
count {{ ns.count }} {{ strftime_now('%Y') }} {{ {'é': '<b>'} | tojson(indent=1) }}
"""
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": ' Is 1 < 2? "Yes" & émoji 👍 '},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]


@pytest.mark.parametrize("template", [CHATML, FEATURES])
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:2]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_gives_the_text_of_transformers(
    template: str, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    expected, _ = render_jinja_template(
        [messages],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert chat.render(template, messages, "<s>", "</s>", add_generation_prompt) == expected[0]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "stopped",
        ),
        ("{{ 7 ** (7 ** 9) % 10 }}", "stopped"),
        (
            "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
            "longer than 4194304 characters",
        ),
        ("{{ 'x' * 9999999 }}", "longer than 4194304 characters"),
        ("{% set x = 'x' * 10 ** 10 %}", "more than 1024 MiB of memory"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ raise_exception('no system\nmessages') }}", "TemplateError: no system"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template: "),
    ],
)
def test_bad_templates_end_with_one_line(template: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(BadInput, match=message) as failure:
        chat.render(template, MESSAGES, time_limit=3)
    assert "\n" not in str(failure.value)
    assert time.monotonic() - started < 6


def test_a_template_of_absurd_size_is_not_compiled() -> None:
    with pytest.raises(BadInput, match="longer than 1048576 characters"):
        chat.render("x" * (1 << 20) + "x", MESSAGES)


def test_jinja_is_found_where_this_process_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare interpreter, and Jinja only on sys.path: so are user's packages to an isolated one."""
    venv.create(tmp_path / "bare", symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    assert chat.render("{{ messages[0].content }}", MESSAGES) == "Be brief."
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith("site-packages")])
    with pytest.raises(BadInput, match="No module named 'jinja2'"):
        chat.render("x", MESSAGES)


def test_the_working_folder_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit('this is not Jinja')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path])
    assert chat.render("{{ messages[0].content }}", MESSAGES) == "Be brief."
