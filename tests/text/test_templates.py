"""Chat templates: transformers' texts, and one line if a template is faulty."""

from typing import Any

import pytest
from tiny import refuses

from infinigen_jax.text.tokenizer import read_template, render_chat

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


FAULTY = {
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "mutation": "{{ messages.append(1) }}",
    "recursion": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "nesting": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "range": "{% for i in range(999999) %}{% endfor %}",
    "refusal": "{{ raise_exception('roles must\nalternate') }}",
    "syntax": "{% for %}",
}


@pytest.mark.parametrize("template", FAULTY.values(), ids=FAULTY)
def test_faulty_templates_end_with_one_line(template):
    message = refuses("chat template refuses this", render_chat, template, MESSAGES, {})
    assert len(message) < 1200 and "\n" not in message
    assert ("roles must alternate" in message) == (template == FAULTY["refusal"])


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.jinja").write_text("\n")
    refuses("the file is empty", read_template, tmp_path / "empty.jinja")
