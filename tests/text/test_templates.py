"""Chat templates: transformers' texts, and an end within a second in any case."""

import concurrent.futures
import time
from types import SimpleNamespace
from typing import Any

import pytest

from infinigen_jax.errors import InputError
from infinigen_jax.text import templates
from infinigen_jax.text.templates import render_chat

MESSAGES = [
    {"role": "system", "content": " Be brief."},
    {"role": "user", "content": "Hello <there>"},
    {"role": "assistant", "content": "é\n"},
    {"role": "user", "content": "And?"},
]
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
FEATURES = """
{{ bos_token }}{% set ns = namespace(n=0) %}
{% if messages[0]['role'] == 'system' %}
  {% set first = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{% endif %}
{% for m in messages %}
    {% if loop.index0 > 9 %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}
    {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
    {% else %}{{ first if loop.first }}{{ m | tojson }}{{ eos_token }}{% endif %}
{% endfor %}
{% macro f(x) %}[{{ x }}]{% endmacro %}
{{ ns.n }}{{ tools is none }}{{ dict(a=1) | tojson(indent=2) }}
{{ f('y') }}{{ unknown }}
"""


@pytest.mark.parametrize("template", [CHATML, FEATURES], ids=["chatml", "features"])
def test_texts_are_those_of_transformers(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    special: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True, **special
    )
    assert render_chat(template, MESSAGES, special) == expected[0]


HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(9999) %}{% for j in range(9999) %}abcdef{% endfor %}{% endfor %}",
    "product": "{{ 'a' * 10**10 }}",
    "long": "{{ 'a' * 20000000 }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "filter": "{{ 'a' | center(10**9) }}",
    "doubling": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "one operation": "{{ ('1' * 4000000) | int }}{{ 3 ** 99999999 % 7 }}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "syntax": "{% for %}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_end_with_one_line(template):
    before = time.monotonic()
    with pytest.raises(InputError, match="chat template refuses this") as caught:
        render_chat(template, MESSAGES, {}, seconds=0.3)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1200
    assert time.monotonic() - before < 3
    assert render_chat("{{ messages[1].content }}", MESSAGES, {}) == MESSAGES[1]["content"]


def test_threads_get_their_own_texts():
    names = [str(number) for number in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda name: render_chat("{{ name }}", MESSAGES, {"name": name}), names)
    assert list(texts) == names


def test_an_interrupted_task_leaves_no_result_to_the_next(monkeypatch):
    """Ctrl-C may come while a template is rendered."""

    def interrupted() -> bytes:
        raise KeyboardInterrupt

    render_chat("first", MESSAGES, {})
    process = templates._worker._process
    assert process is not None and process.stdout is not None
    output = SimpleNamespace(readline=interrupted, close=process.stdout.close)
    monkeypatch.setattr(process, "stdout", output)
    with pytest.raises(KeyboardInterrupt):
        render_chat("interrupted", MESSAGES, {})
    assert render_chat("second", MESSAGES, {}) == "second"


def test_a_worker_that_was_killed_starts_again():
    render_chat("first", MESSAGES, {})
    process = templates._worker._process
    assert process is not None
    process.kill()
    process.wait()
    assert render_chat("second", MESSAGES, {}) == "second"


def test_the_limit_is_processor_time():
    """The reason names the limit that the template has run into."""
    with pytest.raises(InputError, match=r"more than 0\.2 s"):
        render_chat(HOSTILE["loops"], MESSAGES, {}, seconds=0.2)
    with pytest.raises(InputError, match="too much memory"):
        render_chat(HOSTILE["product"], MESSAGES, {})
    with pytest.raises(InputError, match="10000000 characters"):
        render_chat(HOSTILE["long"], MESSAGES, {})
