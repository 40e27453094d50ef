"""`tapproxy check`: exit codes, the JSON of the contract, text that is safe to print, patches."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tapproxy.cli import run
from tapproxy.nginx.checker import DEFAULT_PATHS
from tapproxy.nginx.sandbox import data_dir

BAD = data_dir() / "bad" / "buffering-on.conf"
HEALTHY = data_dir() / "streaming.conf"


def write(directory: Path, text: str) -> str:
    file = directory / "nginx.conf"
    file.write_text(text)
    return str(file)


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    run(["check", *arguments, "--nginx-version", "1.31.3", "--json", "-"])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ((HEALTHY).read_text(), 0),
        ((data_dir() / "bad" / "buffering-on-latent.conf").read_text(), 0),
        (BAD.read_text(), 1),
        ((data_dir() / "bad" / "config-invalid.conf").read_text(), 1),
        ("http { server { listen 80", 2),
        ("events {} http { }", 2),
    ],
    ids=["healthy", "warning", "error", "refused", "unreadable", "no-server"],
)
def test_the_exit_code_says_how_it_ended(
    text: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", write(tmp_path, text), "--nginx-version", "1.31.3"]) == code
    assert ("tapproxy:" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nope.conf"], "nope.conf cannot be read: No such file or directory"),
        ([str(HEALTHY), "--path", "v1"], "--path 'v1' is no path: it begins with a slash, as in /v1/chat/completions"),
        ([str(HEALTHY), "--path", "/v1", "--path", "http://x/v1"], "--path 'http://x/v1' is no path"),
        ([str(HEALTHY), "--live", "--nginx-version", "1.0.15"], "--live cannot run nginx 1.0.15: here is "),
        ([str(HEALTHY), "--write"], "--write changes files as --fix would: say --fix --write"),
        ([str(HEALTHY), "--format", "xml"], "--format is 'xml': expected one of"),
        ([str(HEALTHY), "--nginx-version", "1.31"], "nginx version '1.31' is not of the form 1.31.3"),
        ([str(HEALTHY), "--upstream-profile", "x"], "unknown upstream profile 'x'"),
        ([str(HEALTHY), "--upstream", "x"], "is not of the form NAME=VALUE"),
        ([str(HEALTHY), "--json", "/nonexistent/x"], "cannot be written"),
        ([str(HEALTHY.parent)], "is a directory: name the files to check, as in "),
    ],
    ids=[
        "missing",
        "no-slash",
        "a-url",
        "live",
        "write-alone",
        "format",
        "version",
        "profile",
        "fact",
        "json",
        "folder",
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_a_result_that_could_not_be_written_is_said_before_it_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert run(["check", str(BAD), "--live", "--json", "/nonexistent/x"]) == 2
    assert time.monotonic() - began < 2  # what is measured takes four seconds and more
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)


def test_a_patch_that_serves_several_findings_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    location = "location / { proxy_pass http://e:8000; add_header X-Accel-Buffering no; }"
    file = write(tmp_path, f"server {{\n listen 443 ssl;\n {location}\n}}\n")
    assert run(["check", file, "--nginx-version", "1.31.3"]) == 1
    shown = capsys.readouterr().out
    assert "[buffering-on]" in shown
    assert "[add-header-xab-noop]" in shown
    assert shown.count("    +") == 2  # the head of the patch, and its line
    assert shown.count("    (by the same patch as above)") == 1


def test_a_version_that_lacks_a_directive_says_which_was_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "server { listen 443 ssl; http2 on; location / { proxy_pass http://e:8000; } }\n")
    assumed = run(["check", file])
    shown = capsys.readouterr().out
    version = shown.split()[1]
    note = f"note: checked as nginx {version}; for the one that serves say --nginx-version\n"
    assert (note in shown) == (tuple(map(int, version.split("."))) < (1, 25, 1))
    assert assumed == 1
    assert run(["check", file, "--nginx-version", "1.22.1"]) == 1
    assert "note: checked as" not in capsys.readouterr().out


def test_annotations_say_where_the_patch_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(BAD), "--fix", "--format", "github", "--nginx-version", "1.31.3"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("::error ")
    assert captured.err == "tapproxy: --fix: the patch is printed with --format text, and is in --json\n"


def test_an_empty_file_has_no_empty_line_for_its_statement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", write(tmp_path, ""), "--nginx-version", "1.31.3"]) == 1
    assert '[config-invalid]\n  in: main\n  why: no "events" section' in capsys.readouterr().out


def test_the_json_is_the_contracts(capsys: pytest.CaptureFixture[str]) -> None:
    found = checked(capsys, str(BAD), "--path", "/v1/chat/completions")
    assert (found["schema"], found["nginx_version"], found["files"]) == ("tapproxy.check/1", "1.31.3", [str(BAD)])
    assert isinstance(found["paths"], list)
    (path,) = found["paths"]
    assert {key: path[key] for key in ("path", "server", "location", "file", "line", "proxy_pass")} == {
        "path": "/v1/chat/completions",
        "server": "llm.example.com",
        "location": "/",
        "file": str(BAD),
        "line": 26,
        "proxy_pass": "http://engine",
    }
    assert path["effective"]["proxy_buffering"] == {"value": "on", "from": "default"}
    assert path["effective"]["proxy_http_version"] == {"value": "1.1", "from": f"{BAD}:28"}
    assert path["clients"] == {
        "tls_http1": {
            "streaming": "held",
            "mechanism": "tls_buffer",
            "why": "buffered: nothing is flushed, so the TLS layer gathers 16k before it writes, the header included",
        }
    }
    assert isinstance(found["findings"], list)
    (finding,) = found["findings"]
    assert finding["rule"] == "buffering-on"
    assert (finding["severity"], finding["file"], finding["line"]) == ("error", str(BAD), 27)
    assert finding["directive"] == "proxy_pass http://engine;"
    assert finding["context"] == "http > server llm.example.com > location /"
    assert "+            proxy_buffering off;" in finding["patch"].splitlines()


def test_without_a_path_the_usual_ones_are_tried(capsys: pytest.CaptureFixture[str]) -> None:
    found = checked(capsys, str(HEALTHY))
    assert isinstance(found["paths"], list)
    assert tuple(path["path"] for path in found["paths"]) == DEFAULT_PATHS


def test_a_server_can_be_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path,
        "events {} http { server { listen 443 ssl; server_name a; location / { proxy_pass http://e; } }\n"
        "server { listen 443 ssl; server_name b; proxy_buffering off; location / { proxy_pass http://e; } } }",
    )
    assert run(["check", file, "--nginx-version", "1.31.3"]) == 1
    assert run(["check", file, "--nginx-version", "1.31.3", "--server", "b"]) == 0
    assert run(["check", file, "--nginx-version", "1.31.3", "--server", "unknown"]) == 1  # the default server answers
    capsys.readouterr()


def test_the_version_that_was_taken_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["check", str(HEALTHY), "--nginx-version", "1.25.3"]) == 0
    assert "nginx 1.25.3 (--nginx-version" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "/nonexistent")
    assert run(["check", str(HEALTHY)]) == 0
    assert "nginx 1.31.3 (the newest known, since no nginx is on PATH" in capsys.readouterr().out


def test_fix_prints_one_patch_that_makes_it_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, (data_dir() / "demo-default.conf").read_text())
    assert run(["check", file, "--nginx-version", "1.22.1", "--fix"]) == 1
    captured = capsys.readouterr()
    assert "buffering-on" in captured.err
    subprocess.run(["patch", "-s", file], input=captured.out, text=True, check=True)
    assert run(["check", file, "--nginx-version", "1.22.1", "--fix"]) == 0
    assert capsys.readouterr().out == ""


def test_the_text_names_place_effect_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    run(["check", str(BAD), "--nginx-version", "1.31.3", "--path", "/v1/chat/completions"])
    assert capsys.readouterr().out.replace(str(BAD), "FILE").splitlines() == [
        "nginx 1.31.3 (--nginx-version, engine profile vllm)",
        "",
        "server llm.example.com, location / (FILE:26) -> http://engine",
        "  /v1/chat/completions",
        "  tls_http1  held (tls_buffer): buffered: nothing is flushed, so the TLS layer gathers 16k before it writes, "
        "the header included",
        "",
        "FILE:27:13: error: proxy_buffering is on where that holds tokens back [buffering-on]",
        "  27 |             proxy_pass http://engine;",
        "     |             ^~~~~~~~~~~~~~~~~~~~~~~~~",
        "  in: http > server llm.example.com > location /",
        "  why: TLS with HTTP/1.1 clients: held P50 410 ms, max 800 ms, header included, until 16k have gathered or "
        "the answer ends (16 kB: 73 events)",
        "  to do: set proxy_buffering off in the location that serves the path; proxy_http_version, postpone_output "
        "and buffer sizes do not help",
        "    --- aFILE",
        "    +++ bFILE",
        "    @@ -25,6 +25,7 @@",
        "     ",
        "             location / {",
        "                 proxy_pass http://engine;",
        "    +            proxy_buffering off;",
        "                 proxy_http_version 1.1;",
        '                 proxy_set_header Connection "";',
        "                 proxy_read_timeout 600s;",
        "",
        "1 error",
    ]


def test_a_configuration_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2J\u202e"
    file = write(tmp_path, f'server {{ listen 443 ssl; server_name "{name}"; location / {{ proxy_pass http://e; }} }}')
    run(["check", file, "--nginx-version", "1.31.3"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out


def test_stream_servers_are_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "events {}\nstream { server { listen 1; proxy_pass 127.0.0.1:8000; } }")
    assert run(["check", file, "--nginx-version", "1.25.3"]) == 0
    assert "stream servers pass bytes on as they come" in capsys.readouterr().out


def test_a_fragment_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "server { listen 443 ssl; location / { proxy_pass http://127.0.0.1:8000; } }")
    assert run(["check", file, "--nginx-version", "1.31.3"]) == 1
    assert "is a fragment (http level)" in capsys.readouterr().out


# -- for other programs -----------------------------------------------------------------------------------------


def test_github_gets_one_command_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, (data_dir() / "bad" / "mirror-doubles-inference.conf").read_text())
    assert run(["check", "nginx.conf", "--nginx-version", "1.31.3", "--format", "github"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("::error file=nginx.conf,line=31,col=13,title=mirror-doubles-inference::mirror sends every")
    assert run(["check", str(HEALTHY), "--nginx-version", "1.31.3", "--format", "github"]) == 0
    assert capsys.readouterr().out == ""


def test_sarif_names_files_relative_to_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, BAD.read_text())
    for directory in (tmp_path, Path("/")):
        monkeypatch.chdir(directory)
        assert run(["check", file, "--nginx-version", "1.31.3", "--format", "sarif"]) == 1
        log = json.loads(capsys.readouterr().out)
        (result,) = log["runs"][0]["results"]
        place = result["locations"][0]["physicalLocation"]
        root = log["runs"][0]["originalUriBaseIds"]["SRCROOT"]["uri"]
        assert root + place["artifactLocation"]["uri"] == Path(file).as_uri()
        assert place["region"] == {"startLine": 27, "startColumn": 13}
        assert result["ruleId"] in {one["id"] for one in log["runs"][0]["tool"]["driver"]["rules"]}


@pytest.mark.parametrize("form", ["json", "sarif", "github"])
def test_what_cannot_be_read_is_a_finding_too(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, "events {}\nhttp {\n  gzip on\n}\n")
    assert run(["check", file, "--nginx-version", "1.31.3", "--format", form]) == 2
    captured = capsys.readouterr()
    assert f'{file}:3: directive "gzip" is not terminated by ";"' in captured.err
    assert len(captured.err.splitlines()) == 1
    assert "config-invalid" in captured.out
    if form == "json":
        (one,) = json.loads(captured.out)["findings"]
        assert (one["rule"], one["severity"], one["file"], one["line"]) == ("config-invalid", "error", file, 3)


def test_a_line_with_a_key_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = BAD.read_text().replace(
        "proxy_pass http://engine;", 'proxy_set_header\n Authorization "Bearer sk-1"; proxy_pass http://engine;\n'
    )
    run(["check", write(tmp_path, text), "--nginx-version", "1.31.3"])
    captured = capsys.readouterr()
    assert "[buffering-on]" in captured.out
    assert "sk-1" not in captured.out + captured.err


# -- --fix --write ----------------------------------------------------------------------------------------------


def test_fix_write_changes_the_files_and_keeps_what_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (data_dir() / "demo-default.conf").read_text()
    file = write(tmp_path, text)
    Path(file).chmod(0o640)
    assert run(["check", file, "--nginx-version", "1.22.1", "--fix", "--write"]) == 0
    captured = capsys.readouterr()
    assert "+            proxy_buffering off;" in captured.out.splitlines()
    assert f"changed {file}; as it was: {file}.orig" in captured.err
    assert Path(f"{file}.orig").read_text() == text
    assert Path(file).stat().st_mode & 0o777 == 0o640
    assert "proxy_buffering off;" in Path(file).read_text()
    assert run(["check", file, "--nginx-version", "1.22.1"]) == 0


def test_a_second_write_keeps_the_first_backup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, BAD.read_text())
    Path(f"{file}.orig").write_text("older")
    found = checked(capsys, file, "--fix", "--write")
    assert found["written"] == [{"file": file, "backup": f"{file}.orig.1"}]
    assert isinstance(found["findings"], list)
    assert not [one for one in found["findings"] if one["severity"] == "error"]
    assert Path(f"{file}.orig").read_text() == "older"
    again = checked(capsys, file, "--fix", "--write")
    assert (again["written"], again["patch"]) == ([], None)
