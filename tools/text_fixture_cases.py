"""Inputs of make_text_fixtures.py templates: snippets of the template language, and conversations."""
import re

CONTEXT = {
    "s": "Hello, World", "u": "Ünïcödé ß 你好 😀", "empty": "", "ml": "line1\n  line2\n\nline3\n", "n": 7, "neg": -3, "f": 2.5, "big": 12345678901234567890,
    "t": True, "fa": False, "nil": None, "lst": [3, 1, 2], "words": ["pear", "Apple", "fig", "apple"], "mixed": [1, "a", None, 2.0, True, [1], {"k": "v"}],
    "d": {"b": 1, "a": [1, 2], "c": {"x": None}, "items": "shadow", "get": 5}, "people": [{"name": "Ann", "age": 31, "tags": ["x"]}, {"name": "bob", "age": 25}, {"name": "Cy", "age": 31, "tags": []}],
    "html": "<a href=\"x\">&'</a>", "floats": [0.1, 1e16, 1e-5, 123456789.123, -0.0, 1e22, 5e-324, 100.0, 1.5e300],
    "esc": "tab\there \"quoted\" back\\slash \u0001 \u007f \u2028 é", "deep": {"a": {"b": [{"c": "found"}]}}, "bos_token": "<s>",
}

SNIPPETS = r"""
{{ s }}|{{ u }}|{{ n }}|{{ f }}|{{ t }}|{{ nil }}|{{ lst }}|{{ d }}|{{ mixed }}|{{ floats }}|{{ missing }}|{{ big }}|{{ esc }}
{{ [esc, u, html, "it's", 'say "hi"', "both ' and \""] }}
{{ 1 + 2 * 3 - 4 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7.5 % 2 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 2 ** 0.5 }} {{ -2 ** 2 }} {{ 2 ** 3 ** 2 }}
{{ 10 / 4 }} {{ 10 // 4.0 }} {{ 1e3 }} {{ 1_000 }} {{ 0x1F }} {{ 0b11 }} {{ 0o17 }} {{ 3.0 }} {{ 1e100 }} {{ 1.5e-7 }}
{{ 'a' + 'b' ~ 1 ~ none ~ true }} {{ 'ab' * 3 }} {{ [1] * 2 + [3] }} {{ (1, 2) + (3,) }} {{ 3 * '-' }} {{ 'x' * 0 }} {{ 'x' * -1 }}
{{ 'a' + 1 }}
{{ 1 + none }}
{{ [1] + (2,) }}
{{ 1 / 0 }}
{{ n % 0 }}
{{ missing + 1 }}
{{ missing.x }}
{{ nil.x }}|{{ nil['x'] }}
{{ nil.x.y }}
{{ s.nope }}|{{ d.nope }}|{{ lst.nope }}|{{ lst[99] }}|{{ s[99] }}|{{ d['nope'] }}|{{ n.nope }}
{{ s.nope() }}
{{ missing() }}
{{ s() }}
{{ 1 == 1.0 }} {{ 1 == true }} {{ '1' == 1 }} {{ none == missing }} {{ missing == missing2 }} {{ [1, 2] == [1, 2] }} {{ {'a': 1} == {'a': 1.0} }} {{ (1,) == [1] }} {{ 'a' < 'b' }} {{ 'Z' < 'a' }} {{ [1, 2] < [1, 3] }} {{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 3 > 2 >= 2 }}
{{ 1 < 'a' }}
{{ none < 1 }}
{{ missing < 1 }}
{{ 'ell' in s }} {{ 'x' not in s }} {{ 1 in lst }} {{ 9 in lst }} {{ 'a' in d }} {{ 'zz' in d }} {{ 'x' in missing }} {{ missing in lst }} {{ 1.0 in lst }} {{ true in [1] }} {{ '' in '' }}
{{ 1 in s }}
{{ 'x' in nil }}
{{ 'x' in 5 }}
{{ missing in s }}
{{ [1] in d }}
{{ t and 'yes' or 'no' }} {{ fa and x }} {{ empty or 'default' }} {{ nil or lst }} {{ not t }} {{ not not s }} {{ not missing }} {{ lst and d.a }}
{{ 'a' if t }} {{ 'a' if fa }} {{ 'a' if fa else 'b' if fa else 'c' }} {{ ('x' if fa).y is defined }}
{{ lst[0] }} {{ lst[-1] }} {{ lst[1:] }} {{ lst[:-1] }} {{ lst[::-1] }} {{ lst[::2] }} {{ lst[5:] }} {{ lst[-2:] }} {{ lst[2:0:-1] }} {{ s[0] }} {{ s[-3:] }} {{ s[::-1] }} {{ s[1:8:3] }} {{ u[0:3] }} {{ u[::-1] }} {{ u[-1] }} {{ (1,2,3)[1:] }} {{ lst[True] }}
{{ lst['a':] }}
{{ nil[1:] }}
{{ d[1:] }}
{{ lst[::0] }}
{{ d['a'] }} {{ d.a }} {{ d.c.x }} {{ d['items'] }} {{ d.items() }} {{ d.get('b') }} {{ d.get('zz') }} {{ d.get('zz', 4) }} {{ d['c']['x'] }} {{ d.keys() | list }} {{ d.values() | list }} {{ deep.a.b[0].c }} {{ deep['a'].b.0.c }}
{{ d.items is callable }} {{ d['items'] is string }} {{ people[0].name.upper() }}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
{% for k in d %}{{ k }}{{ ',' if not loop.last }}{% endfor %}
{% for a, b in [(1, 2), [3, 4]] %}{{ a + b }} {% endfor %}
{% for a, b in [(1, 2, 3)] %}{{ a }}{% endfor %}
{% for a, b in ['xy', 'zw'] %}{{ b }}{{ a }}{% endfor %}
{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for x in nil %}{% endfor %}
{% for x in 5 %}{% endfor %}
{% for x in missing %}a{% else %}none{% endfor %}
{% for x in '日本' %}[{{ x }}]{% endfor %}
{% for x in lst if x > 1 %}{{ loop.index }}:{{ x }}/{{ loop.length }} {% else %}no{% endfor %}
{% for x in lst if x > 10 %}{{ x }}{% else %}no{% endfor %}
{% for x in lst %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem is defined }}{{ loop.cycle('a', 'b') }}{{ loop.depth }}|{% endfor %}
{% for x in [1, 1, 2, 2, 1] %}{{ x if loop.changed(x) }}{% endfor %}
{% for x in range(10) %}{% if x == 3 %}{% continue %}{% endif %}{% if x > 5 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% for x in range(2) %}{% for y in range(3) %}{% if y == 1 %}{% break %}{% endif %}{{ x }}{{ y }} {% endfor %}{% endfor %}
{% break %}
{% for t in [{'v': 1, 'c': [{'v': 2, 'c': []}, {'v': 3, 'c': [{'v': 4}]}]}] recursive %}{{ loop.depth }}:{{ t.v }}[{{ loop(t.c) if t.c }}]{% endfor %}
{% set x = 1 %}{% for i in lst %}{{ x }}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}
{% set ns = namespace(x=1, y='a') %}{% for i in lst %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns.y }}{{ ns.z is defined }}{{ ns['x'] }}
{% set ns = namespace({'q': 1}, w=2) %}{{ ns.q + ns.w }}
{% set d.a = 1 %}
{% set missing.a = 1 %}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set c = 1, 2 %}{{ c }}{% set (e, g) = [3, 4] %}{{ e + g }}
{% set x %}abc {{ n }}{% endset %}{{ x }}{{ x | length }}
{% set x | upper | replace('A', '_') %}banana{% endset %}{{ x }}
{% if fa %}{% elif t %}{% set v = 5 %}{% else %}z{% endif %}{{ v }}
{% if missing %}a{% else %}b{% endif %}{% if lst is defined and lst|length > 2 %}c{% endif %}
{% with a = 1, b = n %}{{ a + b }}{% set a = 9 %}{{ a }}{% endwith %}{{ a is defined }}
{% macro m(a, b=2, c='x') %}{{ a }}-{{ b }}-{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(a=5, c='z') }} {{ m() }} {{ m(1, c=4) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}
{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, k=3) }}
{% macro m(x) %}{% set x = x + 1 %}{{ x }}{% endmacro %}{{ m(1) }}{{ x is defined }}
{% set g = 'global' %}{% macro m() %}{{ g }}{% endmacro %}{% set g = 'later' %}{{ m() }}
{% macro f(n) %}{{ n }}{% if n > 0 %},{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}
{% macro m() %}[{{ caller('a') }}]{% endmacro %}{% call(x) m() %}got {{ x }}{% endcall %}
{% macro m() %}[{{ caller() }}]{% endmacro %}{% for i in [1, 2] %}{% call m() %}{{ i }}{% endcall %}{% endfor %}
{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(3) }}
{% macro m() %}x{% endmacro %}{{ m() | upper }}{{ m() is string }}{{ m is callable }}{{ m.name }}
{% filter upper %}abc{{ s }}{% endfilter %}{% filter replace('a', 'b') | trim %}  a a {% endfilter %}
{% raw %}{{ x }} {% if %} {# c #}{% endraw %} {# comment {{ x }} #}after
{% generation %}gen {{ n }}{% set leak = 1 %}{% endgeneration %}{{ leak is defined }}
{% block foo %}in block{% endblock %}
{{ s | upper }} {{ s | lower }} {{ u | upper }} {{ u | lower }} {{ u | title }} {{ "hello wORLD-foo (bar)" | title }} {{ "éA b" | capitalize }} {{ 5 | upper }} {{ nil | upper }}
{{ "  pad " | trim }}| {{ "xxhixx" | trim('x') }} {{ ml | trim }} {{ "\u00a0\u3000a\u2003" | trim }}
{{ s | length }} {{ u | length }} {{ lst | length }} {{ d | count }} {{ missing | length }}
{{ nil | length }}
{{ 5 | length }}
{{ s | replace('o', '0') }} {{ s | replace('o', '0', 1) }} {{ 'aaa' | replace('a', 'b', count=2) }} {{ 12321 | replace(2, 'x') }} {{ 'abc' | replace('', '-') }}
{{ missing | default('D') }} {{ nil | default('D') }} {{ nil | default('D', true) }} {{ empty | d('E', boolean=true) }} {{ missing | default }} {{ missing.x | default('oops') }}
{{ deep.zz.y | default('x') }}
{{ lst | first }} {{ lst | last }} {{ [] | first }} {{ u | first }} {{ u | last }} {{ lst | join }} {{ lst | join(', ') }} {{ people | join(';', attribute='name') }} {{ s | join('.') }} {{ mixed | join('/') }} {{ d | join }}
{{ lst | sort }} {{ lst | sort(reverse=true) }} {{ words | sort }} {{ words | sort(case_sensitive=true) }} {{ people | sort(attribute='age') | map(attribute='name') | list }} {{ people | sort(attribute='age,name', reverse=true) | map(attribute='name') | join(',') }}
{{ mixed | sort }}
{{ words | unique | list }} {{ words | unique(case_sensitive=true) | list }} {{ [1, 1.0, true, 2] | unique | list }} {{ people | unique(attribute='age') | map(attribute='name') | list }}
{{ lst | reverse | list }} {{ s | reverse }} {{ lst | max }} {{ lst | min }} {{ words | max }} {{ words | min }} {{ [] | max }} {{ people | max(attribute='age') }} {{ lst | sum }} {{ people | sum(attribute='age') }} {{ lst | sum(start=10) }} {{ [] | sum }}
{{ d | dictsort }} {{ {'b': 1, 'A': 2, 'c': 0} | dictsort }} {{ {'b': 1, 'A': 2, 'c': 0} | dictsort(true) }} {{ {'b': 1, 'A': 2} | dictsort(by='value', reverse=true) }}
{{ d | items | list }} {{ missing | items | list }}
{{ lst | items | list }}
{{ people | map(attribute='name') | list }} {{ people | map(attribute='tags.0', default='none') | list }} {{ words | map('upper') | join(' ') }} {{ ['1', '2'] | map('int') | sum }} {{ words | map('replace', 'p', 'q') | list }} {{ people | map(attribute='zz') | list }}
{{ people | selectattr('tags') | map(attribute='name') | list }} {{ people | selectattr('age', 'equalto', 31) | map(attribute='name') | list }} {{ people | rejectattr('age', '>', 30) | map(attribute='name') | list }} {{ people | selectattr('tags', 'defined') | list | length }} {{ people | selectattr('name', 'in', ['Ann', 'Cy']) | list | length }}
{{ range(10) | select('odd') | list }} {{ range(10) | reject('divisibleby', 3) | list }} {{ mixed | select('string') | list }} {{ mixed | select | list }} {{ mixed | reject | list }} {{ ['a', 'b'] | reject('equalto', 'a') | list }} {{ range(5) | select('>', 2) | list }}
{{ people | groupby('age') | length }}{% for age, list in people | groupby('age') %}{{ age }}:{% for p in list %}{{ p.name }}{% endfor %};{% endfor %}{% for g in people | groupby('age') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}
{{ range(7) | batch(3) | list }} {{ range(7) | batch(3, 'x') | list }} {{ range(7) | slice(3) | list }} {{ range(7) | slice(3, 'y') | list }}
{{ '42' | int }} {{ '4.7' | int }} {{ 'x' | int }} {{ 'x' | int(-1) }} {{ 3.9 | int }} {{ -3.9 | int }} {{ 'ff' | int(base=16) }} {{ '0x1A' | int(0, 16) }} {{ true | int }} {{ nil | int }} {{ ' 12 ' | int }} {{ '1_000' | int }} {{ '3.5' | float }} {{ 'x' | float }} {{ 'x' | float(1.5) }} {{ 3 | float }} {{ '1e3' | float }} {{ nil | float }} {{ 'inf' | float }}
{{ 5 | abs }} {{ -5 | abs }} {{ -2.5 | abs }} {{ 2.5 | round }} {{ 3.5 | round }} {{ 2.675 | round(2) }} {{ 2.1 | round(0, 'ceil') }} {{ 2.9 | round(method='floor') }} {{ 7 | round }} {{ 1234.5678 | round(1) }} {{ 2.55 | round(1, 'ceil') }} {{ -0.4 | round }}
{{ d | tojson }} {{ mixed | tojson }} {{ floats | tojson }} {{ u | tojson }} {{ esc | tojson }} {{ html | tojson }} {{ nil | tojson }} {{ t | tojson }} {{ big | tojson }} {{ (1, 2) | tojson }} {{ {1: 2, none: 3, true: 4, 1.5: 6} | tojson }}
{{ d | tojson(indent=2) }} {{ [] | tojson(indent=2) }} {{ {} | tojson(indent=4) }} {{ d | tojson(separators=(',', ':')) }} {{ d | tojson(sort_keys=true) }} {{ u | tojson(ensure_ascii=true) }} {{ deep | tojson(indent='\t') }} {{ [[], {}, [1, [2]]] | tojson(indent=1) }}
{{ missing | tojson }}
{{ [missing] | tojson }}
{{ ml | indent }} {{ ml | indent(2, true) }} {{ ml | indent(2, blank=true) }} {{ ml | indent('> ', first=true) }} {{ 'a\r\nb\x0bc' | indent(1) }}
{{ html | escape }} {{ html | e }} {{ html | safe }} {{ s | string }} {{ n | string | length }} {{ nil | string }}
{{ '%s has %d (%.2f) %5d|%-5d|%05d %x %r %%' | format('x', 3, 2.345, 42, 42, 42, 255, 'q') }} {{ '%s' % 5 }} {{ '%s-%s' % (1, 'a') }} {{ '%(a)s %(b)d' | format(a='A', b=2) }} {{ '%+d % d %e' % (5, 5, 12345.678) }}
{{ '%s %s' % 1 }}
{{ '%d' % 'x' }}
{{ 'abc' % 5 }}
{{ "a long sentence of words here" | truncate(15) }} {{ "a long sentence of words here" | truncate(15, true) }} {{ "short" | truncate(15) }} {{ "abcdefghijkl" | truncate(8, true, '~', 0) }} {{ 'hi' | center(7) }}| {{ 'hi' | center(6) }}| {{ "two words" | wordcount }} {{ 'a b/ü?&' | urlencode }}
{{ s.split() }} {{ s.split(', ') }} {{ 'a,b,,c'.split(',') }} {{ 'a,b,,c'.split(',', 1) }} {{ ' a  b '.split() }} {{ ' a  b  c '.split(none, 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ ' a b  c '.rsplit(none, 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ ml.splitlines() }} {{ ml.splitlines(true) }} {{ 'aXbXc'.split('X')[-1] }}
{{ ''.split('') }}
{{ '  x '.strip() }}|{{ '  x '.lstrip() }}|{{ '  x '.rstrip() }}|{{ 'xyx'.strip('x') }}|{{ '\n\nx\n'.lstrip('\n') }}|{{ 'abcba'.rstrip('ab') }}|{{ 'äöä'.strip('ä') }}
{{ s.startswith('Hell') }} {{ s.endswith('ld') }} {{ s.startswith(('x', 'H')) }} {{ s.startswith('W', 7) }} {{ s.endswith('lo', 0, 5) }} {{ s.startswith('') }}
{{ s.startswith(1) }}
{{ s.upper() }} {{ s.lower() }} {{ s.title() }} {{ "it's a dog's ǆ".title() }} {{ s.capitalize() }} {{ s.swapcase() }} {{ 'ß'.upper() }} {{ 'ΑΣ ΣΑ'.lower() }} {{ u.casefold() }}
{{ s.replace('l', 'L') }} {{ s.replace('l', 'L', 2) }} {{ s.find('World') }} {{ s.find('zz') }} {{ s.rfind('o') }} {{ s.find('o', 5) }} {{ u.find('你') }} {{ s.index('W') }} {{ s.count('l') }} {{ 'aaa'.count('aa') }} {{ 'abc'.count('') }}
{{ s.index('zz') }}
{{ ', '.join(words) }} {{ ''.join(['a', 'b']) }} {{ '-'.join('abc') }} {{ 'x'.join({'a': 1, 'b': 2}) }}
{{ ', '.join([1, 2]) }}
{{ 'a-b-c'.partition('-') }} {{ 'a-b-c'.rpartition('-') }} {{ 'abc'.partition('-') }} {{ 'abc'.rpartition('-') }} {{ 'pre-x'.removeprefix('pre-') }} {{ 'x.py'.removesuffix('.py') }} {{ '7'.zfill(3) }} {{ '-7'.zfill(4) }} {{ 'a'.ljust(3, '.') }} {{ 'a'.rjust(3) }} {{ 'ab'.center(5, '*') }} {{ 'ab'.center(6, '*') }}
{{ 'abc'.isalpha() }} {{ 'a1'.isalnum() }} {{ '12'.isdigit() }} {{ ' '.isspace() }} {{ 'AB'.isupper() }} {{ 'aB'.islower() }} {{ ''.isalpha() }} {{ 'a b'.isalpha() }}
{{ '{} and {}'.format(1, 'b') }} {{ '{1}{0}'.format('a', 'b') }} {{ '{x}-{{}}'.format(x=5) }}
{{ lst.index(1) }} {{ lst.count(3) }} {{ (1, 2, 1).count(1) }}
{{ lst.append(4) }}
{{ d.update({'z': 1}) }}
{{ d.pop('a') }}
{{ lst.index(77) }}
{{ n is number }} {{ f is number }} {{ t is number }} {{ s is number }} {{ n is integer }} {{ t is integer }} {{ f is float }} {{ n is float }} {{ t is boolean }} {{ n is boolean }} {{ t is true }} {{ fa is false }} {{ 1 is true }} {{ nil is none }} {{ missing is none }} {{ s is string }} {{ lst is string }} {{ d is mapping }} {{ lst is mapping }} {{ lst is sequence }} {{ s is sequence }} {{ d is sequence }} {{ n is sequence }} {{ lst is iterable }} {{ n is iterable }} {{ missing is iterable }} {{ nil is iterable }} {{ s is defined }} {{ missing is undefined }} {{ missing is not defined }} {{ s is not none }}
{{ 3 is odd }} {{ 4 is even }} {{ 9 is divisibleby 3 }} {{ 9 is divisibleby(2) }} {{ 1 is eq 1 }} {{ 1 is equalto 2 }} {{ 1 is ne 2 }} {{ 2 is gt 1 }} {{ 2 is lt 1 }} {{ 2 is ge 2 }} {{ 2 is le 1 }} {{ 'a' is in ['a'] }} {{ 'a' is in 'cat' }} {{ 'abc' is lower }} {{ 'ABC' is upper }} {{ nil is sameas none }} {{ d is sameas d }} {{ 'upper' is filter }} {{ 'odd' is test }} {{ 'zz' is filter }} {{ range is callable }} {{ s is callable }} {{ s is escaped }}
{{ 1 is nosuchtest }}
{{ 1 | nosuchfilter }}
{{ range(5) | list }} {{ range(2, 8, 3) | list }} {{ range(5, 0, -2) | list }} {{ range(0) | list }} {{ range(3, 3) | list }} {{ range(5)[1] }} {{ range(5) | length }} {{ 3 in range(5) }}
{{ range(1000000) | length }}
{{ range(1, 2, 0) }}
{{ range('a') }}
{{ dict(a=1, b=2) }} {{ dict([('x', 1)]) }} {{ {'a': 1, 'a': 2} }} {{ {} }} {{ {'k': [1, {'n': none}]} }} {{ [1, 2,] }} {{ (1,) }} {{ () }} {{ {'a': 1,} }}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }} {% set j = joiner('; ') %}{% for x in lst %}{{ j() }}{{ x }}{% endfor %}
{{ raise_exception('custom ' ~ n) }}
{% if n > 5 %}{{ raise_exception('too big') }}{% endif %}
{{ 'a' 'b' "c" }} {{ "\n\t\\ \x41 \u00e9 \U0001F600 \'\" \q" }} {{ 'multi
line' }} {{ '\101' }}
{{ (1 + 2) * 3 }} {{ ((1)) }} {{ -(1) }} {{ +5 }} {{ --5 }} {{ not (1 == 2) }} {{ -n }} {{ - f }} {{ -n | abs }} {{ (-n) | abs }} {{ 1 - -1 }}
{{ -s }}
{{ 'a' ~ 'b' * 2 }} {{ 1 ~ 2 + 3 }} {{ 2 * 3 ~ 4 }} {{ 'x' ~ [1] ~ {'a': none} }} {{ 1 if t else 2 + 3 }} {{ t is string or t }} {{ not t is string }} {{ 'a' in 'abc' and 'b' not in 'cd' }} {{ 1 + 1 == 2 }} {{ 1 == 1 == 1 }}
{{ s|upper|lower|title|length }} {{ lst|map('string')|join|int + 1 }} {{ (s|upper)[0] }} {{ s.split(',')[0].upper()|lower }} {{ d.a|first + 1 }} {{ words|first|upper ~ '!' }}
{{ foo.bar is defined }}
{{ d.c is defined and d.c.x is none }} {{ d.c.y is defined }} {{ 'y' in d.c }} {{ d['c'].get('x') is none }}
a {{- ' b ' -}} c {{ 'd' }}  {%- if t %} e {%- endif -%}  f
    {% if t %}
  indented
    {% endif %}
tail
    {%+ if t %}
kept indent
    {%+ endif %}
x {% if t +%}
 plus close
{% endif %}
  {{ 'var keeps indent' }}
  {# comment stripped #}
next {#- trim -#}   line
  {%- for x in lst -%}
   {{ x }},
  {%- endfor +%}
 end
 {%- raw -%}  raw {{ }}  {%- endraw -%}  x
{% if t %}one line{% endif %}
two
{% if t -%}

   stripped

{%- endif %}
{{ 'no newline after var' }}
x
{% for i in [1, 2] %}
  {% if i == 1 %}
    first
  {% else %}
    second
  {% endif %}
{% endfor %}
{% set q = {'a': {'b': [1, 2, {'c': 'deep'}]}} %}{{ q.a.b[2].c }}{{ q['a']['b'][-1]['c'] }}
{{ x if x is defined else 'undef' }}{{ (x | default({})).get('y', 'z') }}
{% print 1, 'a', lst %}
{% for x in lst %}{{ x }}{% else %}e{% endfor %}{% for x in [] %}{% else %}empty{% endfor %}
{% for item in d.a %}{% for k in people %}{{ loop.index }}{{ k.name[0] }}{% endfor %}{{ loop.index }};{% endfor %}
{% autoescape false %}{{ html }}{% endautoescape %}
{{ people[0]['name'] }}{{ people.0.name }}{{ people[-1].tags | length }}{{ people[1].tags | default([]) | length }}
{{ {'a': 1}.items() | list }}{{ {'a': 1}['a'] }}{{ [1, 2, 3][1] }}{{ 'abc'[1] }}{{ (1, 2)[0] }}
{{ "%.3f" | format(3.14159) }}{{ "%5.1f|" | format(2.25) }}{{ '%s' | format(none) }}{{ '%s' | format(lst) }}
{{ 0.1 + 0.2 }} {{ 1e15 + 0.5 }} {{ 1e16 }} {{ 123456789012345680.0 }} {{ 1 / 3 }} {{ 100 * 1.1 }} {{ 5.0 // 2 }} {{ 7 / 7 }} {{ 2.0 ** 3 }} {{ 10 ** 20 }} {{ 1.0 * 3 }} {{ 3 - 3.0 }}
{{ lst == [3, 1, 2] and d.b == 1 }} {{ lst != lst }} {{ 'a' != 'b' }} {{ [] == () }} {{ none != 0 }} {{ 0 == false }} {{ '' == none }}
{%- macro tool(t) -%}{{ t.name }}{%- for p, s in t.props.items() %} {{ p }}:{{ s.type }}{%- if not loop.last %},{% endif %}{%- endfor -%}{%- endmacro -%}{{ tool({'name': 'f', 'props': {'x': {'type': 'int'}, 'y': {'type': 'str'}}}) }}
{{ messages is defined }}{{ bos_token }}{{ eos_token is defined }}
{{
{{ }}
{% if %}
{% if t %}
{% endif %}
{% for x in %}{% endfor %}
{% unknown %}
{{ a b }}
{{ 'unclosed }}
{# unclosed
{% raw %} x
{{ (1 }}
{{ 1 ) }}
{{ [1, 2 }}
{{ $ }}
{{ a. }}
{{ 1 is string is defined }}
{% set 1 = 2 %}
{% set true = 2 %}
{% for %}{% endfor %}
{% else %}
{% macro m(a=1, b) %}{% endmacro %}
{% include 'x' %}
{% call s %}{% endcall %}
{{ f(a=1, 2) }}
""".strip("\n")


def snippets():
    """One per line; a line of plain expressions gives one snippet for each. Then a few that span lines."""
    lines = SNIPPETS.split("\n")
    out = []
    for line in lines:
        if line:
            out.append(line)
            parts = re.findall(r"\{\{.*?\}\}(?=[ |]|$|\{\{)", line)
            if "{%" not in line and len(parts) > 2:
                out += parts
    # The same lines taken together exercise newlines between tags.
    start = next(i for i, line in enumerate(lines) if line.startswith("a {{- ' b '"))
    stop = next(i for i, line in enumerate(lines) if line.startswith("{% set q = "))
    block = "\n".join(lines[start:stop])
    out += [block, block + "\n", block + "\n\n", block.replace("\n", "\r\n"), "\n\n" + block, "{% if t %}\n\n{% endif %}\n", "x\n", "\n", "{{ 'multi\nline' }}\n{{ nope.x }}",
            "{%- if t -%}\n a \n{%- endif -%}\n\n", "  {% if t %}  \n  b  \n  {% endif %}  \n", "\t{# c #}\n{{ s }}\n\n\n", "\u00a0{%- if t %}x{% endif -%}\u2003y"]
    return out


WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Get the weather — naïve \"quotes\" & <tags>", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "城市 name"}, "days": {"type": "integer", "minimum": 1, "maximum": 1e2, "default": 0.1}},
    "required": ["city"], "additionalProperties": False}, "strict": None}}
SEARCH = {"type": "function", "function": {"name": "search", "description": "", "parameters": {"type": "object", "properties": {}}}}
BARE = {"name": "bare_tool", "children": [{"name": "child", "children": []}]}


def call(name, arguments, wrapped=True):
    function = {"name": name, "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function} if wrapped else function


def conversations():
    """(messages, options) pairs; options may hold tools, add_generation_prompt and template keyword arguments."""
    user = lambda c: {"role": "user", "content": c}
    system = lambda c: {"role": "system", "content": c}
    assistant = lambda c, **k: {"role": "assistant", "content": c, **k}
    tool = lambda c, **k: {"role": "tool", "content": c, **k}
    texts = ["Hello!", "", " ", "  padded \n", "multi\nline\n\ntext", "emoji 👩‍💻🇫🇷", "combining e\u0301 ñ", "你好，世界", "שלום مرحبا", "def f(x):\n\treturn {\"a\": x}\n",
             "tabs\tand\r\nCRLF", "<|im_end|> inside <|im_start|>", "{{ not a template }} {% if %}", "</think> stray", "\u2028\u0001\u007f\ufeff", "a" * 300]
    base = [[user(t)] for t in texts]
    base += [[system(t), user("Hi")] for t in texts[:6]]
    base += [[user("1+1?"), assistant(t), user("more")] for t in texts[:9]]
    think = "<think>\nlet me see\n</think>\n\nanswer"
    base += [
        [user("q"), assistant(think)], [user("q"), assistant(think), user("q2")], [user("q"), assistant(think), user("q2"), assistant(think)],
        [user("q"), assistant("answer", reasoning_content="because\n")], [user("q"), assistant("answer", reasoning_content="\n\nbecause\n\n"), user("q2")],
        [user("q"), assistant("answer", reasoning_content="")], [user("q"), assistant("answer", reasoning_content=None), user("q2")],
        [user("q"), assistant("<think>half"), user("q2")], [user("q"), assistant("no open</think>\n\nx"), assistant("again")],
        [user("q"), assistant("", reasoning_content="only")], [system("s"), system("second"), user("u")], [system("only system")],
        [assistant("first"), user("then")], [user("a"), user("b")], [user("x"), assistant("y"), system("mid"), user("z")],
        [{"role": "developer", "content": "dev"}, user("x")], [{"role": "ipython", "content": "out"}, user("x")], [{"role": "skip", "content": "no"}, user("x")],
        [user(None)], [user("x"), assistant(None)], [{"role": "user"}], [{"role": None, "content": "x"}], [{"content": "x"}], [],
        [user([{"type": "text", "text": "part one"}, {"type": "image"}, {"type": "text", "text": "part two"}])], [user([])], [user(5)],
    ]
    args = {"city": "Zürich ☂", "days": 3, "nested": {"b": [1, 2.5, None, True], "a": "x"}, "f": 1e20, "g": 0.1}
    base += [
        [user("w?"), assistant("", tool_calls=[call("get_weather", args)])],
        [user("w?"), assistant("let me check", tool_calls=[call("get_weather", args)])],
        [user("w?"), assistant(None, tool_calls=[call("get_weather", args)]), tool("sunny")],
        [user("w?"), assistant("", tool_calls=[call("get_weather", {}), call("search", {"q": "x"})]), tool("a"), tool("b"), assistant("done")],
        [user("w?"), assistant("c", tool_calls=[call("get_weather", "{\"city\": \"X\"}", False)]), tool("{\"temp\": 3}"), user("thanks")],
        [user("w?"), assistant("", reasoning_content="need tool", tool_calls=[call("get_weather", args)]), tool("r", tool_call_id="call_1", name="get_weather"), assistant("it rains", reasoning_content="so")],
        [user("w?"), assistant("", reasoning_content="r1", tool_calls=[call("search", {})]), tool("t1"), assistant("", reasoning_content="r2", tool_calls=[call("search", {})]), tool("t2"), user("stop"), assistant("ok", reasoning_content="r3")],
        [user("<tool_response>\nfake\n</tool_response>"), assistant("x", reasoning_content="y"), user("z")],
        [tool("orphan"), user("x")], [user("w?"), assistant("", tool_calls=[])], [user("w?"), assistant("x", tool_calls=None), user("y")],
        [user("w?"), assistant("", tool_calls=[call("get_weather", "not json {")]), tool(None)], [user("w?"), assistant("", tool_calls=[call("f", {"a": "1", "b": "two"})]), tool({"k": [1]})],
    ]
    out = []
    for i, messages in enumerate(base):
        out.append((messages, {"add_generation_prompt": i % 2 == 0}))
        if i % 3 == 0 or i > 45:
            out.append((messages, {"add_generation_prompt": i % 2 == 1, "tools": [WEATHER, SEARCH][: 1 + i % 2]}))
        if i % 7 == 0:
            out.append((messages, {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 Jan 2020"}))
            out.append((messages, {"add_generation_prompt": True, "enable_thinking": True, "tools_in_user_message": False, "tools": [WEATHER]}))
            out.append((messages, {"add_generation_prompt": False, "builtin_tools": ["f", "code_interpreter", "search"], "tools": [BARE]}))
    return out


# What a model may say, well formed and not.
_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3, "f": 0.1}}\n</tool_call>'
_XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\n123\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
COMPLETIONS = [
    "", "plain answer", "  padded  \n", "answer<|im_end|>", "answer<|im_end|>trailing", "answer<|endoftext|>", "emoji 👩‍💻 done<|im_end|>",
    "<think>\nreason\n</think>\n\nanswer<|im_end|>", "<think>\n\n</think>\n\nanswer<|im_end|>", "<think>unfinished", "<think>unfinished<|im_end|>",
    "reason\n</think>\n\nanswer<|im_end|>", "text <think>later</think> x<|im_end|>", "<think>a</think>b</think>c<|im_end|>",
    _CALL + "<|im_end|>", "let me see\n" + _CALL + "<|im_end|>", _CALL + "\n" + _CALL + "<|im_end|>", "<think>\nneed\n</think>\n\n" + _CALL + "<|im_end|>",
    "<think>\nneed " + _CALL + "<|im_end|>", "<think>\n" + _CALL + "\n</think>\n\nno call<|im_end|>", "<tool_call>\nnot json\n</tool_call><|im_end|>",
    "<tool_call>\n{\"arguments\": {}}\n</tool_call><|im_end|>", "<tool_call>\n{\"name\": \"x\"", "<tool_call>\n[1]\n</tool_call><|im_end|>", "x</tool_call>y<|im_end|>",
    _XML + "<|im_end|>", "first\n\n" + _XML + "\n" + _XML + "<|im_end|>", "<tool_call>\n<function=search>\n<parameter=q>\n{\"a\": 1}\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\nnothing\n</tool_call><|im_end|>", "<tool_call><function=unknown><parameter=x>multi\nline</parameter></function></tool_call><|im_end|>",
    '{"name": "get_weather", "parameters": {"city": "X"}}<|eot_id|>', '{"name": "", "parameters": {}}<|eot_id|>', '{broken}<|eot_id|>', '  {"name": "f", "arguments": {"a": 1}}  <|eom_id|>',
    '{"x": 1}<|eot_id|>', 'hello<|eot_id|>', '{"name": "f", "parameters": {}} tail<|eot_id|>', "hello<|end_of_text|>",
]
TAILS = [
    [{"role": "user", "content": "next question"}], [{"role": "user", "content": ""}], [{"role": "user", "content": "  padded ünï 😀\n"}],
    [{"role": "tool", "content": "result one"}], [{"role": "tool", "content": "r1"}, {"role": "tool", "content": "r2\n"}],
    [{"role": "tool", "content": "r"}, {"role": "user", "content": "and?"}], [{"role": "system", "content": "mind"}, {"role": "user", "content": "q"}],
    [{"role": "user", "content": "<tool_response>\nx\n</tool_response>"}], [{"role": "assistant", "content": "no"}], [], [{"role": "critic", "content": "x"}],
]


# ---- Families whose markers are their own.
def family_conversations():
    """(messages, tools, add_generation_prompt) beyond conversations(): what these families treat differently."""
    user, tool = (lambda c: {"role": "user", "content": c}), (lambda c, **k: {"role": "tool", "content": c, **k})
    assistant = lambda c, **k: {"role": "assistant", "content": c, **k}
    kimi = lambda name, i, arguments: {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
    args = {"city": "Zürich", "on": True, "off": False, "list": [1, "a"], "map": {"k": False}, "n": 3, "x": 2.5, "text": "two\nlines"}
    asks = [user("w?"), assistant("both", tool_calls=[kimi("get_weather", 0, args), kimi("search", 1, "{\"q\": [1, true], \"s\": \"t\"}")])]
    results = [tool("The sun", tool_call_id="functions.get_weather:0", name="get_weather"), tool("x<y>", tool_call_id="functions.search:1")]
    return [
        (asks, [WEATHER], False), (asks + results, [WEATHER, SEARCH], True), (asks + results + [assistant("done", reasoning_content="r")], [], False),
        (asks + results + [assistant("  done \n", reasoning_content="\n r \n"), user("and?")], [], True),
        ([user("w?"), assistant("Let me check.", tool_calls=[kimi("search", 0, {})])], [SEARCH], False),
        ([user("q"), assistant("<think>a</think>b</think>c"), tool("r"), assistant("d")], [], True),
        ([user("q"), assistant("\n<think>\n a \n</think>\n\n b \n")], [], False), ([user("q"), assistant("x"), tool("")], [], True),
        ([user("q"), assistant("", reasoning_content="r", tool_calls=[kimi("f", 0, "[1]")])], [], False),
        ([user("q"), assistant("a"), assistant("b"), user("c"), user("d")], [], True), ([tool("r"), tool("s"), user("x")], [], True),
        ([user("q"), assistant("  ", tool_calls=[kimi("f", 0, {"a": ""})])], [], False), ([assistant("only")], [], False),
        ([{"role": "system", "content": ""}, user("x")], [WEATHER], True),
    ]


def _glm():
    pair = lambda key, value: f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    call = lambda name, *pairs: f"<tool_call>{name}\n" + "".join(pairs) + "</tool_call>"
    weather = call("get_weather", pair("city", "123"), pair("days", "3"))
    think = "\n<think>reason \n</think>\n"
    return [
        think + "answer<|user|>", "\n<think></think>\nanswer<|user|>", "\n<think>half", "\n<think>half<|user|>", "answer<|user|>", "answer<|endoftext|>",
        think + "answer<|observation|>", think + "cut", think + weather + "<|observation|>", think + "text\n" + weather + "\n" + weather + "<|observation|>",
        "\n<think>need " + weather + " later<|observation|>", think + weather + " and <think>more</think> rest<|observation|>", think + weather,
        think + call("unknown", pair("x", "multi\nline")) + "<|observation|>", think + call("search") + "<|observation|>", think + call("", pair("a", "1")) + "<|observation|>",
        think + call("get_weather", pair("days", "many")) + "<|observation|>", think + call("get_weather", pair("city", "{}"), "<arg_key>days") + "<|observation|>",
        think + call("get_weather", "<arg_key>city</arg_key>") + "<|observation|>", think + call("get_weather", "<arg_key>city</arg_key><arg_value>a") + "<|observation|>",
        think + call("search", pair(" q ", " [1, {\"a\": null}] "), pair("q", "last")) + "<|observation|>", think + "<tool_call>get_weather\n<arg_key>city",
        think + "x</tool_call>y<|user|>", think + weather + "<|observation|>trailing", "<think>a</think>b</think>c<|user|>", think + weather + call("", pair("a", "1")) + "<|observation|>",
    ]


def _minimax():
    invoke = lambda name, *pairs: f'<invoke name="{name}">\n' + "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in pairs) + "</invoke>\n"
    block = lambda *invokes: "<minimax:tool_call>\n" + "".join(invokes) + "</minimax:tool_call>"
    weather = invoke("get_weather", ("city", "123"), ("days", "3"))
    think = "reason\n</think>\n\n"
    return [
        think + "answer[e~[", "<think>\nreason\n</think>\n\nanswer[e~[", "half", "half[e~[", "</think>answer[e~[", "<think>half", "answer</think>x</think>y[e~[",
        think + block(weather) + "[e~[", think + "text\n" + block(weather, invoke("search")) + "\n" + block(weather) + "[e~[", "need " + block(weather) + "[e~[",
        "a " + block(weather) + "</think>b[e~[", think + block() + "[e~[", think + block("<invoke name=\"\">x</invoke>") + "[e~[", think + "<minimax:tool_call>\n" + weather,
        think + block("<invoke name=\"f\">") + "[e~[", think + block(invoke("get_weather", ("days", "many"))) + "[e~[", think + block(invoke("unknown", ("x", " multi\nline "))) + "[e~[",
        think + block("<invoke name=\"f\" x>", weather) + "[e~[", think + block("<invoke name=\"f\"><parameter name=\"a\">1<parameter name=\"b\">2</parameter></invoke>") + "[e~[",
        think + block(invoke("search", ("q", "{\"a\": [1, null]}"), ("q", "last"))) + "[e~[", think + "x</minimax:tool_call>y[e~[", think + block(weather) + "[e~[trailing",
        think + block(weather) + block(invoke("get_weather", ("days", "many")), weather) + "[e~[", "]~b]ai\n<think>\nr</think>x[e~[",
    ]


def _deepseek():
    end = "<｜end▁of▁sentence｜>"
    call = lambda name, arguments: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    section = lambda *calls: "<｜tool▁calls▁begin｜>" + "".join(calls) + "<｜tool▁calls▁end｜>"
    raw = lambda inside: "<｜tool▁call▁begin｜>" + inside + "<｜tool▁call▁end｜>"
    weather = call("get_weather", '{"city": "Zürich", "days": 3}')
    think = "<think>\nreason\n</think>\n\n"
    return [
        "answer" + end, think + "answer" + end, "reason\n</think>\n\nanswer" + end, "<think>half", "<think>half" + end, section(weather) + end, think + "text " + section(weather, weather) + end,
        "<think>need " + section(weather) + end, "<think>a " + section(weather) + "</think>b" + end, "<think>a</think>b</think>c" + end, section() + end, section(raw("function")) + end,
        section(raw("function<｜tool▁sep｜>f")) + end, section(raw("function<｜tool▁sep｜>\n```json\n{}\n```")) + end, section(call("f", "not json")) + end, section(call("f", "")) + end,
        section(raw("function<｜tool▁sep｜>f\n{\"a\": 1}")) + end, section(raw("function<｜tool▁sep｜>f\n```\n{\"a\": 1}```")) + end, section(raw("function<｜tool▁sep｜>f\n```json")) + end,
        "<｜tool▁calls▁begin｜>" + weather, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{", section(weather) + "after" + end, section(weather) + section(weather) + end,
        section(weather, call("f", "[")) + end, section(weather) + end + "trailing", "<｜Assistant｜><think>r</think>x" + end, section(call("f", "[1]")) + end, section("x", weather, "y") + end,
    ]


def _kimi():
    end = "<|im_end|>"
    call = lambda head, arguments: f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    section = lambda *calls: "<|tool_calls_section_begin|>" + "".join(calls) + "<|tool_calls_section_end|>"
    weather = call("functions.get_weather:0", '{"city": "Zürich", "days": 3}')
    think = "<think>\nreason\n</think>\n\n"
    return [
        "answer" + end, think + "answer" + end, "<think>half", "<think>half" + end, section(weather) + end, think + "text " + section(weather, call("search:1", "{}")) + end,
        "<think>need " + section(weather) + end, "<think>a " + section(weather) + "</think>b" + end, section() + end, section(call("", "{}")) + end, section(call(":0", "{}")) + end,
        section(call(" functions.a.b:2 ", " [1] ")) + end, section(call("functions.f:0", "not json")) + end, section(call("functions.f:0", "")) + end,
        section("<|tool_call_begin|>functions.f:0<|tool_call_end|>") + end, section("<|tool_call_begin|>functions.f:0<|tool_call_end|>", weather) + end, "<|tool_calls_section_begin|>" + weather,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\"", section(weather) + "after" + end, section(weather) + section(weather) + end,
        section(weather, call("functions.f:1", "[")) + end, section(weather) + end + "trailing", "<|im_assistant|>assistant<|im_middle|><think>r</think>x" + end, section("x", weather, "y") + end, "no end",
    ]


def _harmony():
    # The prompt ends inside the analysis channel.
    say = lambda channel, body, end="<|end|>": f"<|start|>assistant<|channel|>{channel}<|message|>{body}{end}"
    call = lambda name, arguments, head="commentary <|constrain|>json": f"<|start|>assistant<|channel|>{head.replace(' ', f' to={name} ', 1)}<|message|>{arguments}<|call|>"
    old = lambda name, arguments: f"<|start|>assistant to={name}<|channel|>commentary<|message|>{arguments}<|call|>"
    think, weather = "reason<|end|>", '{"city": "Zürich", "days": 3, "f": 0.1}'
    answer = say("final", " answer\n", "<|return|>")
    return [
        think + answer, answer, "half", "half<|return|>", "half<|call|>", " \n<|end|>" + answer, think + say("final", "cut", ""), think + say("final", "", ""),
        think + say("commentary", "Let me look.") + call("functions.get_weather", weather), think + call("functions.get_weather", weather), think + old("functions.get_weather", weather),
        think + call("functions.get_weather", weather)[:-8], think + call("functions.get_weather", weather[:20]), think + call("functions.get_weather", weather[:20])[:-8],
        think + old("functions.get_weather", weather) + old("functions.search", " {} \n"), think + old("functions.search", "{}") + answer, think + old("functions.", "{}"), think + old("browser.open", "{}"),
        think + old("functions.f", "[1]"), think + old("functions.f", "5"), think + old("functions.f", ""), think + old("functions.f", "not json") + old("functions.f", "{}"), think + old("functions.f", "{}") + "trailing",
        think + say("other", "lost") + answer, think + say("", "lost") + answer, think + "<|start|>assistant<|message|>lost<|end|>" + answer, think + "<|start|>assistant<|channel|>final", "<|start|>",
        say("analysis", "again") + answer, think + say("analysis", "more") + answer, think + say("analysis", "open", "<|return|>"), think + "stray<|end|>more" + answer, "<|channel|>final<|message|>x<|return|>",
        think + "<|start|>assistant<|channel|>final<|message|>no end<|start|>assistant<|channel|>final<|message|>x<|return|>", answer + answer, think + answer + "trailing",
        think + "<|start|>assistant to= to=functions.f x<|channel|>commentary json<|message|>{}<|call|>", think + "<|start|>user<|message|>hello<|end|>" + answer,
    ]


def family_completions(tokenizer):
    """What a model of the family may say, and some of what no model of it would."""
    own = {"glm": _glm, "minimax": _minimax, "deepseek": _deepseek, "kimi": _kimi, "harmony": _harmony}
    return (own[tokenizer]() + COMPLETIONS[:14]) if tokenizer in own else COMPLETIONS
