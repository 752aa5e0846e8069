# SPDX-License-Identifier: Apache-2.0
"""Rule rpg: its lexer, the repetition it finds beside all blocks tried, and what it does to rows."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ASKED
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.kernels import repeats
from vllm_ext.kernels.repeats import NO_LINE
from vllm_ext.samplers import lexer
from vllm_ext.samplers.base import Row
from vllm_ext.samplers.lexer import NAME, NEWLINE, NUMBER, OPEN, STRING
from vllm_ext.samplers.python_rules import FIRST_SYMBOL, PythonRules
from vllm_ext.samplers.rpg import RpgOptions, RpgParams, RpgRule, repeat_of

WORDS = b"if elif else < - pass not return for in x y foo 1 2 == = : ( ) [ ] , ; \" ' 'a' + #".split()
PIECES = [b"", *WORDS, *(b" " + word for word in WORDS)]
PIECES += [b"\n", b"    ", b"elif(", b"iffy", b'f"', b"\n\n", b" ", b"eli", b"f"]
END = 0
PYTHON = PythonRules()


class Toy:
    size = len(PIECES)
    pieces = PIECES

    def encode(self, text: str) -> list[int]:
        """The longest piece each time."""
        names = sorted((piece.decode() for piece in PIECES if piece), key=len, reverse=True)
        return [PIECES.index(part.encode()) for part in re.findall("|".join(map(re.escape, names)), text)]


def changed(text: str, gamma: float = 1.0, count: int = 2, window: int = 1024) -> dict[bytes, float]:
    """What a row behind a text loses, by piece: the same by grammar and by lexical classes."""
    found, by_classes = (changed_by(parser, text, gamma, count, window) for parser in (True, False))
    assert found == by_classes
    return found


def changed_by(
    parser: bool, text: str, gamma: float = 1.0, count: int = 2, window: int = 1024
) -> dict[bytes, float]:
    output = Toy().encode(text)
    assert b"".join(PIECES[token] for token in output) == text.encode()
    rule = RpgRule.from_options(RpgOptions(window=window, parser=parser), Toy())
    torch.manual_seed(0)
    before = torch.randn(3, len(PIECES))
    after = before.clone()
    rows = [Row([5], tokens, END, RpgParams(rpg=gamma, rpg_count=count), ASKED) for tokens in ([], output)]
    rows.append(Row([5], [*output, END, *output], END, RpgParams(rpg=gamma, rpg_count=count), ASKED))
    rule.apply(after, rows)
    assert torch.equal(before[[0, 2]], after[[0, 2]])  # behind nothing, and behind the end
    lost = (before - after)[1]
    return {PIECES[token]: float(lost[token]) for token in (before != after)[1].nonzero().flatten().tolist()}


def symbols_of(text: str) -> list[int]:
    return list(lexer.lex(text.encode()).classes)


CHAIN = "if x == 1:\n    return foo\n"


def chain(copies: int) -> str:
    return CHAIN + "".join(f"elif {'xy'[n % 2]} == {1 + n % 2}:\n    return foo\n" for n in range(copies))


def test_each_copy_makes_the_next_one_harder() -> None:
    assert changed(chain(0)) == {}
    assert changed(chain(1)) == {}
    losses = [changed(chain(copies), gamma=1.5) for copies in range(2, 6)]
    for copies, lost in enumerate(losses, 2):
        assert set(lost) == {b"elif", b" elif", b"elif("}
        for value in lost.values():
            assert value == pytest.approx(1.5 * math.log(1 + copies), abs=1e-5)
    assert changed(chain(3), count=4) == {}
    assert set(changed(chain(4), count=4)) == set(losses[0])


def test_only_where_a_copy_opens() -> None:
    """Of all rows of a chain."""
    tokens = Toy().encode(chain(5))
    for end in range(len(tokens) + 1):
        text = b"".join(PIECES[token] for token in tokens[:end]).decode()
        opens = any(chain(copies) == text for copies in range(2, 6))
        assert bool(changed(text)) == opens, text


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("x = 1\ny = 2\n", {b"x", b"foo", b"eli", b"iffy", b" x"}),  # other names and numbers
        ("x = foo(1)\nx = foo(2) # y\n\n# 1\n", {b"y", b" foo"}),  # comments and empty lines do not count
        ("x = [1, 2,", {b"1", b" 2"}),  # in one line, from where the run begins
        ("    x = 1\n    x = 1\n    ", {b"x", b" x"}),  # a line has begun
        ("for x in y for foo in x", {b" for"}),  # "for" would go on with the word
        ("\"\n'a' + 'a' +", {b"'a'"}),  # a quotation mark that nothing closes ends with its line
        ("'a', 'a',", {b"'a'", b" '", b'f"', b'"'}),
    ],
)
def test_blocks_and_what_opens_them(text: str, pieces: set[bytes]) -> None:
    found = changed(text)
    assert pieces <= set(found)
    if text.startswith("for"):
        assert set(found) == pieces
    assert not {b"=", b" =", b"\n", b"    ", b" "} & set(found)


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n'x = 1'\n",  # the same characters, once as a string
        "x = 1\nx = foo\n",  # a name where a number was
        "if x = 1\nelif x = 1\n",  # keywords differ
        "x y foo x y foo",  # names in a row are prose
        "))))",
        "x = 1\nx = 1\n#",  # in a comment
        'x = 1\nx = 1\n"',  # in a string
        "x = 1\nx = 1",  # more of the number may come, and the line's end
    ],
)
def test_what_is_no_repetition(text: str) -> None:
    assert changed(text) == {}


def test_masked_tokens_stay_masked_and_no_others_are() -> None:
    rule = RpgRule(Toy(), 1024)
    logits = torch.zeros(1, len(PIECES))
    logits[0, PIECES.index(b"elif")] = -torch.inf
    output = Toy().encode(chain(3))
    rule.apply(logits, [Row([], output, END, RpgParams(rpg=100.0), ASKED)])
    assert torch.isinf(logits).sum() == 1
    assert logits[0, PIECES.index(b" elif")] < -100


def test_the_window_begins_with_a_line() -> None:
    long = chain(9)
    assert changed(long)[b"elif"] == pytest.approx(math.log(10), abs=1e-5)
    per_copy = len(Toy().encode(chain(9))) - len(Toy().encode(chain(8)))
    # Four copies and a part of a line, which is cut off.
    assert changed(long, window=4 * per_copy + 3)[b"elif"] == pytest.approx(math.log(5), abs=1e-5)


def brute_force(
    symbols: Sequence[int], indents: Sequence[int], shortest: int, copies: int
) -> tuple[int, int]:
    """All periods, all starts."""
    num, best = len(symbols), (0, 0)
    for period in range(max(shortest, 1), num):
        start = num - period
        while start > 0 and symbols[start - 1] == symbols[start - 1 + period]:
            start -= 1
        if NEWLINE in symbols[num - period :]:
            lines = [place for place in range(start, num) if indents[place] != NO_LINE]
            if not lines:
                continue
            start = min(lines, key=lambda place: (indents[place], place))
        found, rest = divmod(num - start, period)
        if rest == 0 and found >= copies and found * period > best[0] * best[1]:
            best = period, found
    return best


@given(
    st.lists(st.sampled_from([1, 2, NEWLINE]), max_size=14),
    st.lists(st.sampled_from([1, 2, NEWLINE]), max_size=4),
    st.integers(1, 4),
    st.lists(st.sampled_from([NO_LINE, 0, 0, 4]), min_size=30, max_size=30),
    st.integers(1, 4),
    st.integers(2, 4),
)
@settings(deadline=None, max_examples=400)
def test_repetitions(
    head: list[int], block: list[int], times: int, marks: list[int], shortest: int, copies: int
) -> None:
    symbols = head + block * times
    indents = marks[: len(symbols)]
    arrays = np.array(symbols, dtype=np.uint16), np.array(indents, dtype=np.int32)
    found = repeats.longest(*arrays, NEWLINE, shortest, copies)
    assert found == brute_force(symbols, indents, shortest, copies)


def test_classes_of_a_text() -> None:
    assert symbols_of("x = 'a' + f\"b\\\"\" + 1.5e3\n") == [
        NAME, ord("="), STRING, ord("+"), STRING, ord("+"), NUMBER, NEWLINE,
    ]  # fmt: skip
    assert symbols_of('x = """a\n\nb""" + 1\n') == [NAME, ord("="), STRING, ord("+"), NUMBER, NEWLINE]
    assert symbols_of("a /* b\nc */\n// d\ne") == [NAME, NEWLINE, NAME]
    assert symbols_of('x = """a\n') == [NAME, ord("="), OPEN]
    assert symbols_of("caf\u00e9 0xFFu") == [NAME, NUMBER]
    assert symbols_of("a") != symbols_of("if") != symbols_of("elif") != symbols_of("==") != symbols_of("=")
    code = lexer.lex(b"a\n\n  b '''\nc\n''' d\n\t\te\n")
    assert code.indents[code.indents != NO_LINE].tolist() == [0, 2, 2]
    assert [int(symbol) for symbol in code.symbols[code.indents != NO_LINE]] == [NAME] * 3


@given(st.text(alphabet="a1'\"`/*#\\\n (=", max_size=40))
@settings(deadline=None, max_examples=200)
def test_any_text_has_classes(text: str) -> None:
    code = lexer.lex(text.encode())
    lines = code.indents != NO_LINE
    # A line starts behind each line's end, and nowhere else.
    assert (lines[1:] == (code.symbols[:-1] == NEWLINE)).all()
    assert not len(lines) or lines[0]
    repeat_of(code, 2)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("x = 1 + 2\ny = 2 - 1\n", b"foo"),
        ("x == 1\ny < 2\n", b"x"),
        ("    x = 1 - 2\n    y = 1 + 1\n    ", b"y"),
        ("if x == 1:\n    return foo\nelif x < 1:\n    return y\nelif y == 2:\n    return x\n", b"elif"),
    ],
)
def test_the_same_rules_with_other_words(text: str, piece: bytes) -> None:
    """As the paper has it; lexical classes tell operators apart."""
    assert piece in changed_by(True, text)
    assert not changed_by(False, text)


@pytest.mark.parametrize(
    "text",
    [
        "x = 1 + 2\nx = 1 + foo\n",  # another atom
        "x = 1 + 2\nx = (1 + 2)\n",
        "x = [1]\nx = (1)\n",
        "return x\npass\n",
        "x = 1 + 2\nx = 1 == 2\n",
    ],
)
def test_other_rules_are_no_repetition(text: str) -> None:
    assert not changed_by(True, text)


def by_grammar(text: str) -> list[bool]:
    """Of each symbol."""
    symbols = PYTHON.read(text.encode()).symbols
    return [bool(symbol >= FIRST_SYMBOL) for symbol in symbols if symbol != NEWLINE]


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "def f(a, *b: int) -> None:\n    if a:\n        return\n    elif b:\n\n        # so\n        pass\n\nf(1)\n",
        "    x = 1\n    y = 2\nz = 3\n",  # the window began in a block
        "x = [\n    1,\n    2,\n]\ny = '''a\nb''' + f'{x!r:>{y}}' \\\n + 1\n",
        "@a.b\nclass C(D): x: int = 1; y = 2\nasync def g():\n    async with a as b: await c\n",
        "for x in",
        "x = foo(",
        "x = foo(\n    1,\n    2",
    ],
)
def test_what_is_python(text: str) -> None:
    assert all(by_grammar(text))


@pytest.mark.parametrize(
    "text",
    [
        "for (int i = 0; i < 3; i++) {\n    f(i);\n}\n",
        "Sure, here is it.\n",
        "match x:\n    case 1:\n        pass\n",
        "x = 1\ny = = 2\n",
        "x = 1\n        y = 2\n",
        "```js\nx = 1\n```\n",
        "elif x ==",
    ],
)
def test_what_is_not(text: str) -> None:
    assert not any(by_grammar(text))


def test_what_is_python_in_part() -> None:
    cut = by_grammar("elif x == 1:\n    return y\nx = 1\n")  # the window began behind its "if"
    assert (cut.index(True), all(cut[5:])) == (5, True)
    mixed = by_grammar("Here is it, you see:\n```python\nx = 1\n```\nAnd more text.\n```\ny = 2\n```\n")
    assert sum(mixed) == 2 * len(by_grammar("x = 1\n"))


@pytest.mark.parametrize("file", [textwrap.__file__, re.__file__, __file__, pytest.__file__, lexer.__file__])
def test_pythons_own_parser_agrees(file: str) -> None:
    """All of what Python compiles has a derivation; one error more, and it has none."""
    source = Path(file).read_bytes()
    found = PYTHON.read(source)
    assert (found.symbols[found.symbols != NEWLINE] >= FIRST_SYMBOL).all()
    assert not (PYTHON.read(source + b"\nx = = 1\n").symbols >= FIRST_SYMBOL).any()


def test_symbols_do_not_depend_on_where_a_text_stops() -> None:
    """Those of whole lines."""
    source = Path(textwrap.__file__).read_bytes()[-6000:]
    source = source[source.index(b"\n\n\n") :]
    whole = PYTHON.read(source)
    compared = 0
    for end in range(200, len(source), 61):
        part, lines = PYTHON.read(source[:end]), PYTHON.read(source[: source[:end].rfind(b"\n") + 1])
        length = len(lines.symbols)
        if (part.symbols >= FIRST_SYMBOL).any() and part.classes[:length] == whole.classes[:length]:
            assert part.symbols[:length].tolist() == whole.symbols[:length].tolist()
            assert part.indents[:length].tolist() == whole.indents[:length].tolist()
            compared += 1
    assert compared > 30


@given(st.text(alphabet="a1'\"`#\\\n (=:[if e", max_size=40))
@settings(deadline=None, max_examples=300)
def test_any_text_has_symbols(text: str) -> None:
    code = PYTHON.read(text.encode())
    assert len(code.symbols) == len(code.classes) == len(code.indents)
    ends = [place for place, each in enumerate(code.symbols) if each == NEWLINE]
    assert ends == [place for place, each in enumerate(code.classes) if each == NEWLINE]
    repeat_of(code, 2)


def test_without_a_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "parso", None)
    with pytest.raises(ValueError, match=r"parser=True needs parso .*pip install 'vllm-ext\[monitor\]'"):
        RpgRule.check(RpgOptions(parser=True), 8, lambda: "")
    RpgRule.check(RpgOptions(), 8, lambda: "")
    rule = RpgRule.from_options(RpgOptions(), Toy())
    logits = torch.zeros(1, len(PIECES))
    rule.apply(logits, [Row([], Toy().encode("x = 1\ny = 2\n"), END, RpgParams(rpg=1.0), ASKED)])
    assert logits.any()
