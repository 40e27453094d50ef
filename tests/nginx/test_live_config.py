"""What a live check generates: the settings in force, re-rendered, and what it leaves out with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tapproxy.nginx.checker import Examination, examine
from tapproxy.nginx.live_config import NotMeasurableError, Plan, plan
from tapproxy.nginx.live_left_out import BECAUSE, HARMLESS, RESOLVED
from tapproxy.nginx.live_settings import ROWS
from tapproxy.nginx.source import parse
from tests.nginx.hostile import whole

PATH = "/v1/chat/completions"


def planned(text: str, directory: Path, version: str = "1.31.3") -> Plan:
    found = examined(text, directory, version)
    (tree,) = found.trees
    one = found.paths[0]
    return plan(tree, one.hop, tuple(one.clients))


def examined(text: str, directory: Path, version: str = "1.31.3") -> Examination:
    file = directory / "nginx.conf"
    file.write_text(text)
    return examine([file], nginx_version=version, paths=[PATH])


def location(made: Plan) -> list[str]:
    """The statements of the generated location, without proxy_pass."""
    body = re.search(r"location / \{\n(.*?)\n\s*\}", made.text, re.DOTALL)
    assert body is not None
    return [line.strip() for line in body[1].splitlines() if "proxy_pass http" not in line]


@pytest.mark.parametrize(
    ("statements", "generated"),
    [
        ("proxy_buffering OFF;", ["proxy_buffering off;"]),
        ("proxy_buffers 16 8K;", ["proxy_buffers 16 8192;"]),
        ("proxy_read_timeout '1m 30s';", ["proxy_read_timeout 90000ms;"]),
        ("proxy_read_timeout 600;", ["proxy_read_timeout 600000ms;"]),
        ("keepalive_timeout 75s 60s;", ["keepalive_timeout 75000ms;"]),
        ("gzip on; gzip_types text/plain text/event-stream;", ["gzip on;", "gzip_types text/event-stream;"]),
        ("gzip on; gzip_types text/css;", ["gzip on;", "gzip_types application/x-other;"]),
        ("gzip on; gzip_types *;", ["gzip on;", "gzip_types *;"]),
        ("proxy_set_header Connection '';", ['proxy_set_header Connection "";']),
        ("proxy_set_header connection Upgrade;", ['proxy_set_header Connection "upgrade";']),
        ("proxy_set_header Connection $http_connection;", ['proxy_set_header Connection "";']),
        ("proxy_set_header Host $host; proxy_set_header X-Real-IP $remote_addr;", []),
        ("proxy_set_header Accept-Encoding '';", ['proxy_set_header Accept-Encoding "";']),
        ("proxy_ignore_headers x-accel-buffering Expires;", ["proxy_ignore_headers X-Accel-Buffering Expires;"]),
        ("add_header X-Accel-Buffering NO always;", ["add_header X-Accel-Buffering no;"]),
        ("add_header X-Accel-Buffering false;", ["add_header X-Accel-Buffering other;"]),
        ("add_header X-Robots-Tag none;", []),
        ("sub_filter foo bar; sub_filter baz qux;", ["sub_filter tapproxy-looks-for-this tapproxy-puts-this;"]),
        ("proxy_method get;", ["proxy_method GET;"]),
        ("limit_rate 5k;", ["limit_rate 5120;"]),
        ("access_log off; expires 1d; proxy_redirect off; fastcgi_buffering off;", []),
    ],
)
def test_a_setting_is_written_anew(statements: str, generated: list[str], tmp_path: Path) -> None:
    made = planned(whole(location=statements), tmp_path)
    assert location(made) == generated
    assert made.not_run == []


@pytest.mark.parametrize(
    ("statements", "because"),
    [
        ("limit_rate $slow;", "its value is a variable"),
        ("gzip_comp_level 12;", "its number '12' is not within 1 to 9"),
        ("proxy_buffers 100000 1m;", "100000 buffers of 1048576 bytes are more than is run here (67108864 bytes)"),
        ("proxy_buffer_size 1g;", "its size '1g' is more than is run here (67108864 bytes)"),
        ("proxy_set_header Connection $unknown;", "the value '$unknown' of Connection is not known here"),
        ("mirror /m;", "it sends every prompt to a second upstream"),
        ("limit_req zone=a burst=5;", "it delays or refuses requests that come together; one at a time is measured"),
        ("body_filter_by_lua_file x.lua;", "it is code"),
        ("some_vendor_thing on;", "it is not among the settings that are run"),
    ],
)
def test_what_is_not_run_is_said_with_its_place(statements: str, because: str, tmp_path: Path) -> None:
    made = planned(whole(location=statements), tmp_path)
    assert [(one.directive, one.because, one.line) for one in made.not_run] == [(statements, because, 4)]
    assert location(made) == []


def test_a_mirror_that_is_off_is_not_worth_a_word(tmp_path: Path) -> None:
    assert (
        planned(whole(location="mirror off; auth_request off; proxy_cache off; auth_basic off;"), tmp_path).not_run
        == []
    )


def test_the_nearest_level_counts_and_a_list_replaces_the_outer_one(tmp_path: Path) -> None:
    text = whole(
        http="proxy_buffering on; gzip on; proxy_set_header Connection '';",
        server="proxy_buffering off;",
        location="proxy_set_header Host $host;",
    )
    assert location(planned(text, tmp_path)) == ["proxy_buffering off;", "gzip on;"]


def test_an_upstream_block_keeps_its_order_and_one_server(tmp_path: Path) -> None:
    text = whole(
        http="upstream e { server 198.51.100.7:80 weight=3; server 198.51.100.8:80 backup; keepalive 16; least_conn; "
        "keepalive_timeout 4s; zone e 64k; }",
        target="location / { proxy_pass http://e/v1/; }",
    )
    made = planned(text, tmp_path)
    assert re.search(
        r"upstream pool0 \{\s+server 127\.0\.0\.1:@ENGINE@;\s+keepalive 16;\s+least_conn;\s+"
        r"keepalive_timeout 4000ms;\s+\}",
        made.text,
    )
    assert "proxy_pass http://pool0;" in made.text
    assert [one.directive for one in made.not_run] == ["server 198.51.100.8:80 backup;"]


@pytest.mark.parametrize("address", ["http://ENGINES/v1/", "http://$backend"])
def test_an_upstream_block_is_found_in_any_case_and_by_a_variable(address: str, tmp_path: Path) -> None:
    text = whole(
        http="upstream engines { server 198.51.100.7:80; keepalive 4; }",
        server="set $backend engines;",
        target=f"location / {{ proxy_pass {address}; }}",
    )
    made = planned(text, tmp_path)
    assert "keepalive 4;" in made.text
    assert "proxy_pass http://pool0;" in made.text


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ("default upgrade; '' close;", "close"),
        ("default upgrade; '' '';", ""),
        ("default upgrade; ~.* close;", "upgrade"),
        ("default upgrade; '' $http_connection;", None),
        ("default x;", None),
    ],
)
def test_a_map_is_asked_what_a_client_without_upgrade_gets(rows: str, word: str | None, tmp_path: Path) -> None:
    text = whole(http=f"map $http_upgrade $c {{ {rows} }}", location="proxy_set_header Connection $c;")
    made = planned(text, tmp_path)
    assert location(made) == ([] if word is None else [f'proxy_set_header Connection "{word}";'])
    assert len(made.not_run) == (word is None)


def test_servers_behind_one_another_are_all_run(tmp_path: Path) -> None:
    text = whole(
        http="server { listen 127.0.0.1:8443 ssl; location / { proxy_pass http://198.51.100.7; proxy_buffering off; } "
        "}",
        target="location / { proxy_pass https://127.0.0.1:8443; limit_rate 9k; }",
    )
    found = examined(text, tmp_path)
    (one,) = [path for path in found.paths if path.hop.inner is not None]
    made = plan(found.trees[0], one.hop, tuple(one.clients))
    assert set(made.places) == {"LISTEN_HTTP1", "INNER1", "ENGINE"}
    assert "proxy_pass https://127.0.0.1:@INNER1@;" in made.text
    assert "listen 127.0.0.1:@INNER1@ ssl;" in made.text
    assert made.text.count("proxy_buffering off;") == made.text.count("limit_rate 9216;") == 1


def test_the_shortest_read_timeout_of_all_servers_is_known(tmp_path: Path) -> None:
    assert planned(whole(location="proxy_read_timeout 2s;"), tmp_path).read_timeout_ms == 2000
    assert planned(whole(), tmp_path).read_timeout_ms == 60_000


def test_a_path_that_nothing_proxies_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotMeasurableError, match="nothing is proxied here: answered here: return 204") as caught:
        planned(whole(target="location / { return 204; }"), tmp_path)
    assert [one.line for one in caught.value.not_run] == [4]


def test_a_credential_is_not_shown(tmp_path: Path) -> None:
    made = planned(whole(location="some_vendor_token sk-1; auth_jwt realm token=sk-2;"), tmp_path)
    assert {one.directive for one in made.not_run} == {"some_vendor_token (hidden);", "auth_jwt (hidden);"}


def test_no_directive_is_in_two_tables() -> None:
    tables = [ROWS.keys(), BECAUSE.keys(), HARMLESS, RESOLVED]
    for index, table in enumerate(tables):
        for other in tables[index + 1 :]:
            assert set(table) & set(other) == set()


def test_the_text_is_what_the_parser_reads(tmp_path: Path) -> None:
    text = planned(whole(location="gzip on;"), tmp_path).filled({"LISTEN_HTTP1": 1024, "ENGINE": 1025})
    assert [one.name for one in parse(text, "x")] == ["worker_processes", "error_log", "events", "http"]
    assert "@" not in text
