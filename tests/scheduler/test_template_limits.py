"""Templates that ask for more time or memory than there is, against the bounds that refuse them; and what they may do,
against jinja2's own sandbox."""

import tracemalloc

import jinja2.sandbox
import pytest

from copyengine.wire.errors import ConfigError, RequestRefused
from scheduler import template_limits
from scheduler.chat_template import MAX_SOURCE_CHARS, ChatTemplate

MEGA = "{% set s = 'a' * 1000000 %}"
GROWING = "{% set n = namespace(s='x', t=[1], u=[1]) %}{% for i in range(60) %}"
TWICE = GROWING + "{% set n.t = [n.t, n.t] %}{% set n.u = [n.u, n.u] %}{% endfor %}"

MEMORY = "more than 536,870,912 characters"
ELEMENTS = "looks at more than 200,000 elements"
WIDTH = "more than 1,000,000"

TOO_MUCH = [
    (GROWING + "{% set n.s = n.s ~ n.s %}{% endfor %}", MEMORY),
    (GROWING + "{% set n.s = n.s + n.s %}{% endfor %}", MEMORY),
    (GROWING + "{% set n.t = n.t + n.t %}{% endfor %}", MEMORY),
    (MEGA + "{{ s|replace('a', s)|length }}", MEMORY),
    (MEGA + "{{ s.replace('', s)|length }}", MEMORY),
    (MEGA + "{{ ([s] * 10000)|join|length }}", MEMORY),
    (MEGA + "{{ s.join([s] * 1000)|length }}", MEMORY),
    (MEGA + "{{ ([{'a': s}] * 1000)|map(attribute='a')|join|length }}", MEMORY),
    (MEGA + "{{ s|join(s)|length }}", MEMORY),
    (MEGA + "{{ s.translate({97: s})|length }}", MEMORY),
    (MEGA + "{% for i in range(99999) %}{{ s }}{% endfor %}", MEMORY),
    (
        MEGA + "{% set n = namespace(l=[]) %}{% for i in range(99999) %}{% set n.l = n.l + [s[i:]] %}{% endfor %}",
        MEMORY,
    ),
    ("{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}", MEMORY),
    ("{{ ('\\t' * 1000000).expandtabs(1000000)|length }}", MEMORY),
    ("{{ ('a\\n' * 500000)|indent(1000000)|length }}", MEMORY),
    ("{{ ([1] * 100000)|tojson(indent=100000)|length }}", MEMORY),
    ("{{ '%1000000000d' % 1 }}", WIDTH),
    ("{{ '%*d' % (1000000000, 1) }}", WIDTH),
    ("{{ '%1000000000d'|format(1) }}", WIDTH),
    ("{{ '{:1000000000}'.format(1) }}", WIDTH),
    ("{{ '{:{}}'.format(1, 1000000000) }}", WIDTH),
    ("{{ '{a:1000000000}'.format_map({'a': 1}) }}", WIDTH),
    ("{{ 'a'.ljust(1000000000) }}", WIDTH),
    ("{{ (1).to_bytes(1000000000, 'big')|length }}", WIDTH),
    ("{{ [1]|batch(1000000000, 'x')|list|length }}", WIDTH),
    ("{{ [1]|slice(1000000000)|list|length }}", WIDTH),
    ("{{ 1.5|round(10000000, 'ceil') }}", WIDTH),
    (GROWING + "{% set n.s = loop.index + 9 if loop.first else n.s * n.s %}{% endfor %}", "65536 bits"),
    (TWICE + "{{ n.t }}", ELEMENTS),
    (TWICE + "{{ n }}", ELEMENTS),
    (TWICE + "{{ n.t == n.u }}", ELEMENTS),
    (TWICE + "{{ n.t is eq(n.u) }}", ELEMENTS),
    (TWICE + "{{ n.t in [n.u] }}", ELEMENTS),
    (TWICE + "{{ [n.t, n.u]|sort|length }}", ELEMENTS),
    (TWICE + "{{ n.t|tojson }}", ELEMENTS),
    (TWICE + "{{ '%s' % (n.t,) }}", ELEMENTS),
    ("{{ ('<' * 1000000)|striptags }}", "striptags is given more than 100,000"),
    ("{{ lipsum(n=1000000) }}", "undefined"),
    ("{{ ['%1000000000d']|format(1) }}", WIDTH),
    (TWICE + "{{ n.t|upper }}", ELEMENTS),
    (TWICE + "{{ ([n.t, n.u]|select)|sort|length }}", ELEMENTS),
    (TWICE + "{{ {'a': n.t}.items() == {'a': n.u}.items() }}", ELEMENTS),
    ("{{ (([[1] * 100000] * 300)|select|sum(start=[]))|length }}", ELEMENTS),
    ("{{ ([[1] * 90000] + [[]] * 90000)|sum(start=[])|length }}", MEMORY),
    ("{{ ([[1] * 90000] + [[]] * 90000)|select('defined')|sum(none, [])|length }}", MEMORY),
]

UNREAD = [
    MEGA + "{{ ''.join(([s] * 1500)|select)|length }}",
    MEGA + "{{ ''.join(([s] * 1500)|reject('none'))|length }}",
    MEGA + "{{ ''.join(([s] * 1500)|reverse)|length }}",
    MEGA + "{{ ''.join(([{'x': s}] * 1500)|map(attribute='x'))|length }}",
    MEGA + "{{ s.join((['a'] * 1500)|select)|length }}",
    MEGA + "{% set n = namespace(p=[]) %}{% for i in range(600) %}{% set n.p = n.p + [(i, s)] %}{% endfor %}"
    "{{ ''.join(dict(n.p).values())|length }}",
    MEGA + "{{ ([cycler(s)] * 1500)|join(attribute='current')|length }}",
    MEGA + "{{ ([joiner(s)] * 1500)|join(attribute='sep')|length }}",
    MEGA + "{{ ([1] * 1500)|replace('1', s)|length }}",
]
"""Texts of a gigabyte and more, from what tells nothing of its size by itself."""

ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]

PLAIN = [
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }} {{ m.content|trim }}{% endfor %}",
    "{% for m in messages %}{{ m['content'][1:] ~ 1 ~ [1, 'a'] }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(', ') }}",
    "{{ '%s-%5d' % ('a', 3) }}{{ '%05.2f'|format(1.5) }}{{ '{:>4}{x}'.format(1, x=2) }}{{ 12345678 + 1 }}",
    "{{ messages[0].content.split(' ')[-1].lstrip('h').upper() }}{{ messages[0].items()|list }}{{ 'a' in 'abc' }}",
    "{% macro m(x) %}<{{ x }}{{ caller() if caller else '' }}>{% endmacro %}{{ m(1) }}{% call m(2) %}in{% endcall %}",
    "{% set n = namespace(a=0) %}{% for i in range(10) %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}{{ 3 * 'ab' }}",
    "{% set x %}{% filter upper %}body{% endfilter %}{% endset %}{{ x|replace('B', 'c')|indent(2) }}",
    "{{ [[1], [2, 3]]|sum(start=[]) }}{{ [{'a': (1,)}]|sum('a', (0,)) }}{{ []|sum(start=[]) }}{{ [1, 2]|select|sum }}",
    "{{ '-'.join(messages|map(attribute='role')) }}{{ [1]|replace(1, 2) }}{{ none|upper }}{{ ['%s']|format(1) }}",
    "{{ messages|map(attribute='role')|sort|join }}{{ [1, 1]|select|unique|list }}{{ [2, 1]|select|max }}",
    "{{ (messages|length) > 1 and messages[-1].role in ['user', 'x'] }}{{ [3, 1]|sort }}{{ 7 % 4 }}",
]  # fmt: skip


@pytest.mark.parametrize(("template", "named"), TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_what_is_too_much_is_refused_before_it_is_made(
    template: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MAX_WALKED", 200_000)
    with pytest.raises(RequestRefused, match=named):
        ChatTemplate(template, {}, "x").render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("template", UNREAD, ids=range(len(UNREAD)))
def test_what_tells_nothing_of_its_size_is_refused_before_it_is_made(template: str) -> None:
    """Against the memory that Python itself has given out meanwhile."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestRefused, match=MEMORY):
            ChatTemplate(template, {}, "x").render([])
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("template", ENDLESS)
def test_what_does_not_end_is_ended(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "RENDER_S", 0.2)
    with pytest.raises(RequestRefused, match=r"takes more than 0\.2 s"):
        ChatTemplate(template, {}, "x").render([])


@pytest.mark.parametrize("template", PLAIN)
def test_what_is_not_too_much_reads_as_without_limits(template: str) -> None:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    messages = [{"role": "user", "content": " hi there "}, {"role": "assistant", "content": "so it is"}]
    assert ChatTemplate(template, {}, "x").render(messages) == environment.from_string(template).render(
        messages=messages
    )


def test_a_template_that_is_too_long_refuses_the_start() -> None:
    with pytest.raises(ConfigError, match="more than 1,000,000 characters"):
        ChatTemplate("x" * (MAX_SOURCE_CHARS + 1), {}, "x")


def test_an_allowance_is_a_renderings_own() -> None:
    """Against a template that takes most of one, used again and again."""
    template = ChatTemplate(MEGA + "{% for i in range(400) %}{{ s|length }}{% set t = s ~ '' %}{% endfor %}", {}, "x")
    assert template.render([]) == template.render([]) == "1000000" * 400
