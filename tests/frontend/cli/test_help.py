"""`quire help`: the manual page and the completion of a shell name what --help-all names."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest
from quire.__main__ import COMMANDS
from quire.frontend.cli.bench import MODES
from quire.frontend.cli.help import SHELLS, escaped, parsers
from quire.tests.frontend.cli.command import call


def test_the_manual_page_has_every_flag_of_the_full_help(capsys: pytest.CaptureFixture) -> None:
    code, page, _ = call(capsys, "help", "--man")
    assert code == 0 and page.startswith(".TH QUIRE 1 ")
    text = page.replace("\\-", "-")
    names = [name for name, _ in parsers()]
    assert names == [*(c for c in COMMANDS if c != "bench"), *(f"bench {mode}" for mode in MODES)]
    for name, section in zip(names, re.split(r"^\.SH QUIRE .*\n", text, flags=re.M)[1:]):
        _, full, _ = call(capsys, *name.split(), "--help-all")
        flags = re.findall(r"^  (?:-\w, )?(--[\w-]+)", full, flags=re.M)
        assert flags and set(flags) <= set(re.findall(r"--[\w-]+", section)), name


def test_text_is_no_command_of_roff() -> None:
    assert escaped(".SH x\\y\n  --z") == "\\&.SH x\\ey \\-\\-z"
    assert escaped("'quoted") == "\\&'quoted"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_reads_the_manual_page_without_a_warning(capsys: pytest.CaptureFixture) -> None:
    _, page, _ = call(capsys, "help", "--man")
    command = ["groff", "-man", "-ww", "-Tutf8", "-K", "utf8"]
    done = subprocess.run(command, input=page, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    plain = re.sub(".\x08", "", done.stdout)  # bold is a letter typed twice
    assert "EXIT STATUS" in plain and "--kv-cache-memory-bytes" in plain


def test_bash_completes_commands_and_flags(capsys: pytest.CaptureFixture, tmp_path) -> None:
    pytest.importorskip("shtab")
    code, script, _ = call(capsys, "help", "--completion", "bash")
    assert code == 0
    (tmp_path / "quire.bash").write_text(script)
    for words, wanted in (("quire se", "serve"), ("quire serve --max-mod", "--max-model-len")):
        typed = words.split()
        ask = (
            f"source {tmp_path / 'quire.bash'}; COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; "
            'function=$(complete -p quire | sed "s/.*-F \\([^ ]*\\).*/\\1/"); '
            f"$function quire {typed[-1]} {typed[-2]}; "
            f'echo "${{COMPREPLY[@]}}"'
        )
        done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=60)
        assert wanted in done.stdout.split(), done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_completes_every_command(shell: str, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("shtab")
    code, script, err = call(capsys, "help", "--completion", shell)
    words = set(re.findall(r"[\w-]+", script))
    assert (code, err) == (0, "") and {*COMMANDS, *MODES} <= words
    assert "max-model-len" in script
    if shutil.which(shell) is not None and shell != "tcsh":  # tcsh cannot only read a script
        checked = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_without_the_library_it_says_what_to_install(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, out, err = call(capsys, "help", "--completion", "zsh")
    assert (code, out) == (2, "") and "pip install shtab" in err
