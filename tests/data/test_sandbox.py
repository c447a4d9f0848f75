"""Templates from strangers: no way out, no endless loop, no huge text; also given in a recipe."""

import json
import subprocess
import sys
import time

import pytest
from data_toys import chat

from shardwise.data.sandbox import Template, TemplateRefusal
from shardwise.data.templates import chat_template
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import DataError


def test_s03_reaching_out_of_the_sandbox_is_refused() -> None:
    for source in (
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set x = messages.append(1) %}",
    ):
        with pytest.raises((DataError, TemplateRefusal), match=r"sandbox|unsafe|Undefined"):
            Template(source, "x").render(messages=[1])


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999)|list|length }}{% endfor %}",
        "{% for a in range(99999) if range(99999)|list %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(90) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(90) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(90) %}"
        "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(90) %}"
        "{% set n.x = n.x|replace('a', 'aaaa') %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(90) %}"
        "{% set n.x = n.x.replace('a', 'aaaa') %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 'a'.center(10000000000) }}",
        "{{ 'a'|indent(10000000000) }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '{0:999999999}'.format(1) }}",
        "{{ 9**9**9 }}",
        "{% macro m(x) %}{{ m(x) }}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    ],
)
def test_s03_endless_and_huge_templates_stop(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(DataError, match="is stopped"):
        Template(source, "x").render(messages=[])
    assert time.monotonic() - started < 10


X = "{% set x = 'a' * 16000000 %}"
KEEP = "{% set n = namespace(l=[]) %}{% for i in range(9000) %}{% set n.l = n.l + [@] %}{% endfor %}"
HUGE = {
    "join method": X + "{{ x.join(['a'] * 1000) }}",
    "join filter": X + "{{ (['a'] * 1000)|join(x) }}",
    "a list printed": X + "{{ [x] * 1000 }}",
    "a list as JSON": X + "{{ ([x] * 1000)|tojson }}",
    "a list as text": X + "{{ ([x] * 1000)|string|length }}",
    "many concatenated": X + "{{ " + " ~ ".join(["x"] * 1000) + " }}",
    "format": X + "{{ ('{0}' * 1000).format(x) }}",
    "percent": X + "{{ ('%s' * 1000) % (" + ",".join(["x"] * 1000) + ") }}",
    "bytes": "{{ ('a'.encode() * 8000000000)|length }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "translate": X + "{{ ('a' * 100000).translate({97: x}) }}",
    "a block": X + "{% set y %}{% for i in range(1000) %}{{ x }}{% endfor %}{% endset %}",
    "a macro": "{% macro m() %}{% for i in range(9000) %}{{ 'a' * 999999 }}{% endfor %}{% endmacro %}{{ m() }}",
    "sum of lists": "{{ ([[1] * 900000] * 1000)|sum(start=[])|length }}",
    "kept texts": KEEP.replace("@", "'a' * 16000000"),
    "kept copies": X + KEEP.replace("@", "x|upper"),
    "kept slices": X + KEEP.replace("@", "x[1:]"),
    "kept lists": KEEP.replace("@", "[1] * 900000"),
    "kept JSON": X + KEEP.replace("@", "x|tojson"),
    "kept pieces": X + KEEP.replace("@", "x.split('a')"),
}
# In a process of its own: what gets through would take this one's memory.
MEASURE = """
import json, resource, sys
from shardwise.data.sandbox import Template
from shardwise.errors import DataError
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
for name, source in json.loads(sys.stdin.read()).items():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        Template(source, "x").render(messages=[])
        why = "rendered"
    except DataError as problem:
        why = problem.why
    print(json.dumps([name, why, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024]))
"""


def test_s03_no_operation_of_a_template_takes_the_machines_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], input=json.dumps(HUGE), capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, _, _ in found] == list(HUGE)
    for name, why, mebibytes in found:
        assert "characters" in why or "no chat template needs" in why or "no numbers" in why, (name, why)
        assert mebibytes < 400, (name, mebibytes)


def test_an_ordinary_template_may_build_its_text_in_pieces() -> None:
    """What limits could get in the way of: long chats whose text is gathered in a variable."""
    source = (
        "{% set n = namespace(t='') %}{% for m in messages %}"
        "{% set n.t = n.t ~ '<|' ~ m.role ~ '|>' ~ m.content[:] ~ (m.tools | tojson) %}{% endfor %}{{ n.t }}"
    )
    messages = [{"role": "user", "content": "word " * 200, "tools": [{"a": [1, 2]}]} for _ in range(200)]
    assert len(Template(source, "x").render(messages=messages)) > 200_000


def test_s03_a_template_given_in_a_recipe_is_held_to_the_same(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="is stopped"):
        chat_template(
            tokenizer, "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
        )


def test_a_template_in_a_row_is_only_text(tokenizer: Tokenizer) -> None:
    made = chat_template(tokenizer)
    assert "{{ 7 * 7 }}" in made.render(chat("{{ 7 * 7 }}", "a")["messages"], False)


def test_what_real_templates_use_works() -> None:
    source = (
        "{%- for m in messages -%}{% if loop.first %}{% continue %}{% endif %}"
        "{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{{ m|tojson }}"
        "{% generation %}{{ m.x|trim }}{% endgeneration %}"
        "{% if m.x %}{% break %}{% endif %}{%- endfor -%}"
        "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(k=1)['k'] }}{{ 'a-b'.split('-')[-1] }}"
        "{{ messages[::-1]|length }}{{ messages|map(attribute='x')|join(',') }}{{ strftime_now('%Y')|length }}"
    )
    messages = [{"x": ""}, {"x": " <y> "}, {"x": "z"}]
    assert Template(source, "x").render(messages=messages) == '1False3{"x": " <y> "}<y>21b3, <y> ,z4'


def test_a_refusal_and_a_syntax_error_say_why(tokenizer: Tokenizer) -> None:
    with pytest.raises(TemplateRefusal, match="only pairs"):
        Template("{{ raise_exception('only pairs') }}", "x").render()
    with pytest.raises(DataError, match="line 2"):
        Template("{% if x %}\n{% endfor %}", "x")
    with pytest.raises(DataError, match="does not write each turn exactly once"):
        chat_template(tokenizer, "{{ messages[-1]['content'] }}")
    with pytest.raises(DataError, match="cannot be read"):
        chat_template(tokenizer, "no_such_file.jinja")
