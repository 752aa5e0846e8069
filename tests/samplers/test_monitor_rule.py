# SPDX-License-Identifier: Apache-2.0
"""Rule monitor: its masks beside the rule of the paper, where it acts, and what jedi says of real code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ASKED
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.samplers import python_monitor
from vllm_ext.samplers.base import Row
from vllm_ext.samplers.monitor import MonitorOptions, MonitorParams, MonitorRule
from vllm_ext.samplers.python_monitor import attributes

END = 0
PARTS = ("a", "b", "ab", "aba", "(", "a(", "ab.b", "b a", " ", "é", "n", "name", "na", "me", "name(")


class Pieces:
    """Then each byte as a token, so that a test may write any output."""

    pieces = (
        b"",
        b"",
        b"\xff",
        *(part.encode() for part in PARTS),
        *(bytes([value]) for value in range(128)),
    )
    size = len(pieces)

    def encode(self, text: str) -> list[int]:
        return [3 + len(PARTS) + value for value in text.encode()]


PIECES = Pieces()


def row(text: str, prompt: str = "", **params: Any) -> Row:
    params = {"monitor": "names", **params}
    return Row(PIECES.encode(prompt), PIECES.encode(text), END, MonitorParams(**params), ASKED)


def rule_of(names: Sequence[str]) -> tuple[MonitorRule, list[str]]:
    asked: list[str] = []

    def known(code: str, file: str | None) -> Sequence[str]:
        asked.append(code)
        return names

    return MonitorRule({"names": known}, PIECES), asked


def allowed(rule: MonitorRule, where: Row) -> set[int] | None:
    """Token ids; None where all are."""
    before = torch.randn(1, PIECES.size)
    after = before.clone()
    rule.apply(after, [where])
    finite = torch.isfinite(after[0])
    assert torch.equal(after[0][finite], before[0][finite])
    return None if finite.all() else set(finite.nonzero().flatten().tolist())


def by_the_paper(names: Sequence[str], typed: str) -> set[int] | None:
    """Step 3 of the algorithm, token by token."""
    left = {name[len(typed) :] for name in names if name.startswith(typed)}
    if not left:
        return None
    found = {END} if "" in left else set()
    for token, piece in enumerate(PIECES.pieces):
        text = piece.decode(errors="replace")
        for rest in left:
            if text and (rest.startswith(text) or re.match(rf"{rest}\W", text)):
                found.add(token)
    return found


@given(
    st.sets(st.text(alphabet="abn", min_size=1, max_size=5), max_size=5),
    st.text(alphabet="abn", max_size=3),
)
@settings(deadline=None, max_examples=80)
def test_masks_are_those_of_the_paper(names: set[str], typed: str) -> None:
    rule, asked = rule_of(sorted(names))
    assert allowed(rule, row(f"x.{typed}")) == by_the_paper(sorted(names), typed)
    assert asked == ["x."]


def test_names_may_end_with_what_no_name_has() -> None:
    rule, asked = rule_of(["name", "named"])
    pieces = PIECES.pieces
    begun = allowed(rule, row("f(x).na"))
    assert begun is not None
    assert {pieces[token] for token in begun} == {b"me", b"m"}
    whole = allowed(rule, row("f(x).name"))
    assert whole is not None
    assert {END, pieces.index(b"("), pieces.index(b" "), pieces.index(b"d"), 2} <= whole
    assert not whole & {pieces.index(b"a"), pieces.index(b"name"), 1}
    first = allowed(rule, row("f(x)."))
    assert first is not None
    assert pieces.index(b"name(") in first
    assert END not in first
    assert asked == ["f(x)."]  # once a site


@pytest.mark.parametrize(
    "text", ["", "x", "x.y(", "x. ", "...", ". ", "x.name ", "(.", "```python\nx.y\n```\nSee x.", "x.z"]
)
def test_nothing_else_is_touched(text: str) -> None:
    rule, _ = rule_of(["y", "name"])
    assert allowed(rule, row(text)) is None
    ended = row("x.")
    ended.output.append(END)  # type: ignore[attr-defined]  # a list
    assert allowed(rule, ended) is None


@pytest.mark.parametrize(
    ("text", "given", "code"),
    [
        ("x.", {"prompt": "import x\n"}, "import x\nx."),
        ("x.", {"prompt": "a", "monitor_context": "b = 1\n"}, "b = 1\nx."),
        ("Sure:\n```python\nx.", {"prompt": "import y\n"}, "x."),
        ("Sure:\n```\nx.", {"monitor_context": "b = 1\n"}, "b = 1\nx."),
        ("```py\n1\n```\nand\n```py\nx.", {}, "x."),
        ("x.", {"prompt": "Go on:\n```python\nimport x\n"}, "import x\nx."),
        ("x.", {"prompt": "```python\nimport x\n```\n"}, "x."),
        ("", {"prompt": "import x\nx."}, "import x\nx."),
        ("n", {"prompt": "x", "monitor_context": "b = 1\nb."}, "b = 1\nb."),
    ],
)
def test_what_is_the_code(text: str, given: dict[str, Any], code: str) -> None:
    rule, asked = rule_of(["name"])
    assert allowed(rule, row(text, **given)) is not None
    assert asked == [code]


def test_rows_of_several_requests() -> None:
    rule = MonitorRule({"names": lambda *_: ["ab"], "others": lambda *_: ["name"]}, PIECES)
    logits = torch.zeros(3, PIECES.size)
    rule.apply(logits, [row("x."), row("x.", monitor="others"), row("x")])
    found = [{PIECES.pieces[i] for i in torch.isfinite(one).nonzero().flatten().tolist()} for one in logits]
    assert found[0] == {b"a", b"ab", b"ab.b"}
    assert found[1] == {b"n", b"na", b"name", b"name("}
    assert len(found[2]) == len(set(PIECES.pieces))


def test_a_monitor_that_fails_raises() -> None:
    """The engine adapter ends the request."""
    rule = MonitorRule({"names": lambda code, _: [code[999]]}, PIECES)
    for _ in range(2):
        with pytest.raises(IndexError):
            allowed(rule, row("x."))


def test_jedis_own_faults_restrict_nothing_and_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import jedi  # type: ignore[import-untyped]

    logged: list[str] = []
    monkeypatch.setattr(python_monitor.logger, "warning", lambda text, *given: logged.append(text % given))
    monkeypatch.setattr(jedi.Script, "complete", lambda self: [][1])
    assert not attributes("import math\nmath.")
    assert not attributes("import re\nre.")
    (line,) = logged
    assert "jedi failed" in line
    assert "IndexError" in line


def test_pythons_attributes() -> None:
    assert {"sqrt", "pi"} <= set(attributes("import math\nmath."))
    assert "foo" not in attributes("import math\nmath.")
    own = (
        "class A:\n    def __init__(self):\n        self.alpha = 1\n\n    def beta(self): ...\n\na = A()\na."
    )
    assert {"alpha", "beta", "__init__"} <= set(attributes(own))
    assert "gamma" not in attributes(own)
    for nothing in ('x = "a.', "# see math.", "x = 1  # math.", "1.", "unknown.", "class (:\nx."):
        assert not attributes(nothing), nothing


@pytest.mark.parametrize(
    "code",
    [
        # Strings and comments that are not closed.
        "x = '''\nmath.",
        'class A:\n    """Makes a list.\n\n    Returns a str.',
        "f'{str.",
        "x = r'\\' str.",
        "x = 1  # 'as a' str.",
        # Where there may be others.
        "class A:\n    def go(self):\n        self.",
        "import argparse\nargs = argparse.ArgumentParser().parse_args()\nargs.",
        "from types import SimpleNamespace\nx = SimpleNamespace(a=1)\nx.",
        "x = None\nx.",
    ],
)
def test_where_others_may_exist_nothing_is_known(code: str) -> None:
    assert not attributes(code)


@pytest.mark.parametrize(
    "code",
    [
        "x = 'don\nstr.",
        'x = "\\"" + \'"\'\nx.',
        '"""str.\n"""\nstr.',
        "class A:\n    def __init__(self):\n        self.name = 'a'\n        self.name.",
    ],
)
def test_code_behind_strings_is_code(code: str) -> None:
    assert "upper" in attributes(code)


@pytest.fixture
def repository(tmp_path: Path) -> str:
    """Two modules in a package below ``src``, one beside it, and one outside."""
    package = tmp_path / "repository" / "src" / "shop"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text("class Order:\n    total = 1\n\n    def ship(self): ...\n")
    (package / "views.py").write_text("def show(order): ...\n")
    root = tmp_path / "repository"
    (root / "tool.py").write_text(
        "from shop.models import Order\nfrom shop.views import show\n\n\ndef made():\n    return Order()\n\n\n"
        "show(made())\n"
    )
    (tmp_path / "outside.py").write_text("a_secret = 1\n")
    return str(root)


@pytest.mark.parametrize(
    ("code", "file"),
    [
        ("from shop.models import Order\nOrder().", None),
        ("from shop import models\nmodels.Order().", "tests/test_shop.py"),
        ("import tool\ntool.made().", None),
        ("from .models import Order\nOrder().", "src/shop/cart.py"),
        ("from ..models import Order\nOrder().", "src/shop/parts/cart.py"),
        # What a function is called with elsewhere.
        ("def show(order):\n    order.", "src/shop/views.py"),
    ],
)
def test_the_repository_is_known(repository: str, code: str, file: str | None) -> None:
    assert {"total", "ship"} <= set(attributes(code, repository, file))
    assert not attributes(code)


@pytest.mark.parametrize("with_root", [False, True])
@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.path.append({folder!r})\nimport outside\noutside.",
        "import sys\nsys.path.insert(0, {folder!r})\nimport outside\noutside.",
        "import sys\nsys.path += [{folder!r}]\nimport outside\noutside.",
        "import sys\n(sys  # so\n .path.append({folder!r}))\nimport outside\noutside.",
        "from ...{dotted} import outside\noutside.",
        "from .. import outside\noutside.",
        "from ... import outside\noutside.",
    ],
)
def test_other_folders_are_not_told_of(repository: str, code: str, with_root: bool) -> None:
    """Of what a request may name it learns nothing, unless the server has named it."""
    folder = str(Path(repository).parent)
    told = code.format(folder=folder, dotted=folder.replace("/", ".").strip("."))
    place = (repository, "tool2.py") if with_root else ()
    assert "a_secret" not in attributes(told, *place)


def test_it_would_be_told_of() -> None:
    """jedi itself follows such code: the test above can fail."""
    script = (
        "import jedi, os, pathlib, tempfile; folder = tempfile.mkdtemp(); "
        "pathlib.Path(folder, 'outside.py').write_text('a_secret = 1'); "
        "code = f'import sys\\nsys.path.append({folder!r})\\nimport outside\\noutside.'; "
        "project = jedi.Project(os.devnull, sys_path=[], smart_sys_path=False); "
        "assert 'a_secret' in [name.name for name in jedi.Script(code, project=project).complete()]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_jedi_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from jedi.inference import imports  # type: ignore[import-untyped]

    monkeypatch.delattr(imports, "_level_to_base_import_path")
    with pytest.raises(ValueError, match=r"needs jedi .*is not known here; install jedi 0\.20"):
        MonitorRule.check(MonitorOptions(), 8, lambda: "")


def test_files_are_below_the_root(repository: str, tmp_path: Path) -> None:
    options = MonitorOptions(root=repository)
    MonitorRule.check(options, 8, lambda: "")
    asked = MonitorParams(monitor="python", monitor_file="src/shop/cart.py")
    assert MonitorRule.problem(options, asked, ASKED) is None
    assert "start it with root" in str(MonitorRule.problem(MonitorOptions(), asked, ASKED))
    for file in ("/etc/x.py", "../x.py", "a/../../x.py", "a\0.py"):
        params = MonitorParams(monitor="python", monitor_file=file)
        assert "a path below the server's root" in str(MonitorRule.problem(options, params, ASKED)), file
    for root in (str(tmp_path / "none"), str(Path(repository, "tool.py")), "a\0", "~nobody-of-that-name/x"):
        with pytest.raises(ValueError, match=r"root=.* is no folder; name that of the repository"):
            MonitorRule.check(MonitorOptions(root=root), 8, lambda: "")


def test_the_rule_tells_monitors_where_the_code_stands(
    repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_users.py").write_text(
        "from pathlib import Path\n\n\ndef sees(code, root, file):\n    return [Path(root).name, Path(file).stem]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    options = MonitorOptions(root=repository, monitors={"mine": "a_users:sees"})
    rule = MonitorRule.from_options(options, PIECES)
    own = row("x.", monitor="mine", monitor_file="src/name.py")
    found = allowed(rule, own)
    assert found is not None
    assert {PIECES.pieces[token] for token in found} == {b"r", b"n", b"na", b"name", b"name("}
    asked = {"monitor": "python", "monitor_file": "src/shop/cart.py"}
    found = allowed(rule, row("from .models import Order\nOrder().", **asked))
    assert found is not None
    assert {PIECES.pieces[token] for token in found} == {b"s", b"t", b"_"}


def test_files_of_a_repository_are_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("vllm_ext.samplers.monitor.time.monotonic", lambda: now[0])
    asked: list[str] = []

    def known(code: str, file: str | None) -> Sequence[str]:
        asked.append(code)
        return ["name"]

    rule = MonitorRule({"names": known}, PIECES, fresh=30.0)
    for now[0] in (100.0, 101.0, 160.0):
        assert allowed(rule, row("x.")) is not None
    assert len(asked) == 2


def test_compiled_modules_are_not_imported_here() -> None:
    script = (
        "import sys; from vllm_ext.samplers.python_monitor import attributes; "
        "assert attributes('import _curses\\n_curses.'); assert '_curses' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_conversations_have_code_in_fences_only() -> None:
    rule, _ = rule_of(["name"])
    special = PIECES.pieces.index(b"")
    prompt = [special, *PIECES.encode("x"), special, *PIECES.encode("\n")]
    params = MonitorParams(monitor="names")
    for text, is_code in (("x.", False), ("```python\nx.", True), ("```js\nx.", False), ("```\nx.", True)):
        where = Row(prompt, PIECES.encode(text), END, params, ASKED)
        assert (allowed(rule, where) is not None) == is_code, text
    completion = Row([special, special, *PIECES.encode("x")], PIECES.encode("."), END, params, ASKED)
    assert allowed(rule, completion) is not None


def test_a_row_is_never_left_with_nothing() -> None:
    """As where allowed_token_ids has forbidden all names."""
    rule, _ = rule_of(["name"])
    logits = torch.full((1, PIECES.size), -torch.inf)
    logits[0, PIECES.pieces.index(b"(")] = 1.0
    before = logits.clone()
    rule.apply(logits, [row("x.")])
    assert torch.equal(logits, before)


def test_the_python_monitor_holds_a_row_to_what_exists() -> None:
    rule = MonitorRule.from_options(MonitorOptions(), PIECES)
    code = "class A:\n    def name(self): ...\n\n    def nap(self): ...\n\n\nA()."
    found = allowed(rule, row(code, monitor="python"))
    assert found is not None
    assert {PIECES.pieces[token] for token in found} == {b"n", b"na", b"name", b"name(", b"_"}


@pytest.mark.parametrize("where", ["nowhere:check", f"{__name__}:nothing", f"{__name__}:END", "json"])
def test_monitors_that_cannot_be_imported_are_refused(where: str) -> None:
    with pytest.raises(ValueError, match=r"monitors\.mine=.* cannot be imported .*name a function"):
        MonitorRule.check(MonitorOptions(monitors={"mine": where}), 8, lambda: "")
    MonitorRule.check(MonitorOptions(), 8, lambda: "")


def test_without_jedi_start_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jedi", None)
    with pytest.raises(ValueError, match=r"needs jedi .*pip install 'vllm-ext\[monitor\]'"):
        MonitorRule.check(MonitorOptions(), 8, lambda: "")
    MonitorRule.check(MonitorOptions(monitors={"python": f"{__name__}:rule_of"}), 8, lambda: "")


def test_requests_that_are_refused() -> None:
    options = MonitorOptions(monitors={"mine": "x:y"})
    unknown = MonitorRule.problem(options, MonitorParams(monitor="java"), ASKED)
    assert unknown == "monitor='java' is not allowed; allowed: 'python', 'mine'"
    structured = replace(ASKED, structured=True)
    assert "structured_outputs" in str(
        MonitorRule.problem(options, MonitorParams(monitor="mine"), structured)
    )
    assert MonitorRule.problem(options, MonitorParams(monitor="mine"), ASKED) is None
