"""Lark grammars as regular expressions: the grammar with which an agent patches files, every
construct, and what has no equivalent.
"""

import re

import pytest
from quire.frontend.server.apis.lark_regex import LarkError, lark_regex

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | update  // two kinds
add: "*** Add File: " name LF add_line+
update: "*** Update File: " name LF
    (change | "@@" LF)+
name: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""


def accepts(grammar: str, text: str) -> bool:
    return re.fullmatch(lark_regex(grammar), text) is not None


def test_a_grammar_of_patches() -> None:
    patch = "*** Begin Patch\n*** Add File: a b.txt\n+one\n+\n*** End Patch"
    assert accepts(PATCH, patch) and accepts(PATCH, patch + "\n")
    assert accepts(PATCH, patch.replace("Add File: a b.txt\n+one", "Update File: a\n@@\n-x\n+y"))
    for broken in (patch[4:], patch.replace("+one", "one"), "*** Begin Patch\n*** End Patch"):
        assert not accepts(PATCH, broken)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "a"i "."', ["a.", "A."], ["ab"]),
        ('start: "0".."9" ~ 2..3', ["12", "123"], ["1", "1234"]),
        ('start: "x" ~ 2', ["xx"], ["x", "xxx"]),
        ('start: ["-"] INT\n%import common.INT', ["-12", "3"], ["-", "--1"]),
        ('start: n ("," n)*\nn: DIGITS\nDIGITS.2: /[0-9]/+\n', ["1,22"], ["1,", ""]),
        ("start: /a\\/b/i", ["a/b", "A/B"], ["ab"]),
        ('?start: "(" [NUM] ")"\n%import common.DIGIT -> NUM', ["()", "(1)"], ["(x)"]),
        ('start: "\\n\\"" | "ü"', ['\n"', "ü"], ["n"]),
    ],
)
def test_constructs(grammar: str, good: list[str], bad: list[str]) -> None:
    assert all(accepts(grammar, text) for text in good)
    assert not any(accepts(grammar, text) for text in bad)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" start | "b"',
        "start: other",
        'start: "a"\n%ignore " "',
        'start: "a" )',
        'start: ("a"',
        "start: /a(?=b)/",
        "%import python.INT\nstart: INT",
        "&",
        "a\n",
        "\n".join(["start: a0", *(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)), 'a40: "x"']),
        "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(9000)), 'a9000: "x"']),
    ],
)
def test_what_has_no_equivalent_is_an_error(grammar: str) -> None:
    with pytest.raises(LarkError):
        lark_regex(grammar)
