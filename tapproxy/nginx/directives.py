"""What nginx's directives are: tables, no code that decides.

Rules here: a row has a source (nginx's change log, its documentation, or ``nginx -t`` on 1.22.1 and 1.31.3). What is
not in a table is not judged: a directive nobody listed is accepted, because third-party modules add their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Build:
    """The optional modules of one nginx binary, by their names in ``nginx -V`` (``http_gunzip``, ``stream``)."""

    modules: frozenset[str]
    dynamic: frozenset[str] = frozenset()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The newest release these tables were written for.
NEWEST_KNOWN: Final = "1.31.3"

# HTTP/1.1 and a keepalive cache towards the upstream became the default here (CHANGES of 1.29.7).
HTTP11_DEFAULT: Final[Version] = (1, 29, 7)
# HTTP/2 responses send their header at once when unbuffered (measured: late on 1.22.1, not on 1.31.3).
H2_HEADER_FLUSH: Final[Version] = (1, 29, 1)
# A plain listener with http2 also accepts HTTP/1.1 (CHANGES of 1.25.1).
H2C_WITH_HTTP1: Final[Version] = (1, 25, 1)

# Value where no level sets the directive. A list of (since, value) where it changed, oldest first.
DEFAULTS: Final[dict[str, str | tuple[tuple[Version, str], ...]]] = {
    "chunked_transfer_encoding": "on",
    "client_body_buffer_size": "16k",
    "client_body_timeout": "60s",
    "client_max_body_size": "1m",
    "gzip": "off",
    "gzip_http_version": "1.1",
    "gzip_min_length": "20",
    "gzip_proxied": "off",
    "gzip_types": "text/html",
    "keepalive_timeout": "75s",
    "limit_rate": "0",
    "postpone_output": "1460",
    "proxy_buffer_size": "4k",
    "proxy_buffering": "on",
    "proxy_buffers": "8 4k",
    "proxy_cache": "off",
    "proxy_connect_timeout": "60s",
    "proxy_http_version": (((0,), "1.0"), (HTTP11_DEFAULT, "1.1")),
    "proxy_ignore_client_abort": "off",
    "proxy_intercept_errors": "off",
    "proxy_next_upstream": "error timeout",
    "proxy_pass_request_body": "on",
    "proxy_read_timeout": "60s",
    "proxy_request_buffering": "on",
    "proxy_send_timeout": "60s",
    "proxy_store": "off",
    "send_timeout": "60s",
    "ssl_buffer_size": "16k",
    "tcp_nodelay": "on",
}

# What `effective` of a path names, in this order: all that bears on when bytes pass.
SHOWN: Final = (
    "proxy_buffering", "proxy_http_version", "proxy_ignore_headers", "proxy_set_header", "proxy_request_buffering",
    "proxy_read_timeout", "gzip", "gzip_types", "chunked_transfer_encoding", "tcp_nodelay", "ssl_buffer_size",
    "limit_rate", "proxy_cache", "client_max_body_size",
)  # fmt: skip

# Directives that nginx refuses twice in one block ("is duplicate"). Checked with `nginx -t` on both versions.
SINGLE: Final = _words(
    """
    add_header_inherit aio alias auth_request charset
    chunked_transfer_encoding client_body_buffer_size client_body_timeout
    client_header_timeout client_max_body_size default_type directio etag expires gzip gzip_buffers gzip_comp_level
    gzip_http_version gzip_min_length gzip_vary http2 if_modified_since internal keepalive_requests
    keepalive_timeout limit_rate limit_rate_after lingering_close merge_slashes output_buffers
    postpone_output proxy_buffer_size proxy_buffering proxy_buffers
    proxy_busy_buffers_size proxy_cache proxy_cache_key proxy_cache_lock proxy_cache_min_uses proxy_connect_timeout
    proxy_force_ranges proxy_http_version proxy_ignore_client_abort proxy_intercept_errors proxy_limit_rate
    proxy_max_temp_file_size proxy_method proxy_next_upstream_timeout proxy_next_upstream_tries proxy_pass
    proxy_pass_request_body proxy_pass_request_headers proxy_read_timeout proxy_request_buffering proxy_send_timeout
    proxy_set_body proxy_socket_keepalive proxy_ssl_name proxy_ssl_server_name proxy_ssl_session_reuse
    proxy_ssl_verify proxy_store proxy_temp_file_write_size reset_timedout_connection root satisfy send_timeout sendfile
    server_tokens ssl_buffer_size ssl_session_timeout tcp_nodelay tcp_nopush try_files types_hash_max_size
    underscores_in_headers worker_connections worker_processes worker_shutdown_timeout
    """
)

# Directives with a fixed set of values, by version: (since, values), oldest first.
VALUES: Final[dict[str, tuple[tuple[Version, frozenset[str]], ...]]] = {
    "proxy_http_version": (
        ((0,), frozenset({"1.0", "1.1"})),
        ((1, 29, 4), frozenset({"1.0", "1.1", "2"})),
    ),
}

# The first argument's form: a time or a size. nginx says "invalid value".
TIMES: Final = _words(
    """
    proxy_read_timeout proxy_send_timeout proxy_connect_timeout send_timeout client_body_timeout client_header_timeout
    """
)
SIZES: Final = _words(
    "proxy_buffer_size proxy_busy_buffers_size client_max_body_size client_body_buffer_size ssl_buffer_size"
)

# First release that knows the directive; before it nginx says "unknown directive".
SINCE: Final[dict[str, Version]] = {
    "add_header_inherit": (1, 29, 3),
    "early_hints": (1, 29, 0),
    "http2": (1, 25, 1),
    "http3": (1, 25, 0),
    "keepalive_min_timeout": (1, 27, 4),
    "proxy_pass_trailers": (1, 27, 2),
    "proxy_ssl_certificate_cache": (1, 27, 4),
}
# First release that no longer knows it (http level only).
REMOVED: Final[dict[str, Version]] = {"ssl": (1, 25, 1), "spdy_headers_comp": (1, 9, 5)}

# Families in which a name that no table has is a misspelling, and their members that crossplane 0.5.8 lacks.
CLOSED_FAMILIES: Final = ("proxy_", "gzip_")
NEWER_NAMES: Final = _words(
    """
    proxy_cookie_flags proxy_ssl_conf_command proxy_half_close proxy_ssl_alpn proxy_ssl_key_log proxy_pass_trailers
    proxy_ssl_certificate_cache proxy_request_dynamic proxy_cache_convert_head gzip_hash gzip_no_buffer gzip_window
    """
)

# Directives of modules that a build may lack: the module's name in `nginx -V`.
MODULES: Final[dict[str, str]] = {
    "add_after_body": "http_addition",
    "add_before_body": "http_addition",
    "addition_types": "http_addition",
    "auth_request": "http_auth_request",
    "auth_request_set": "http_auth_request",
    "dav_methods": "http_dav",
    "geoip_country": "http_geoip",
    "gunzip": "http_gunzip",
    "gunzip_buffers": "http_gunzip",
    "gzip_static": "http_gzip_static",
    "http2": "http_v2",
    "http3": "http_v3",
    "image_filter": "http_image_filter",
    "mail": "mail",
    "mp4": "http_mp4",
    "perl": "http_perl",
    "perl_set": "http_perl",
    "real_ip_header": "http_realip",
    "secure_link": "http_secure_link",
    "set_real_ip_from": "http_realip",
    "slice": "http_slice",
    "ssl_certificate": "http_ssl",
    "stream": "stream",
    "stub_status": "http_stub_status",
    "sub_filter": "http_sub",
    "sub_filter_last_modified": "http_sub",
    "sub_filter_once": "http_sub",
    "sub_filter_types": "http_sub",
    "xslt_stylesheet": "http_xslt",
}

# crossplane's table of 2022 is stale for these: what it says about them is not believed.
STALE_IN_CROSSPLANE: Final = ("js_", "keepalive", "resolver", "auth_jwt", "keyval", "mgmt", "zone", "otel_", "quic_")

# Blocks whose body is data or another language, never statements of nginx.
OPAQUE_BLOCKS: Final = frozenset({"map", "geo", "types", "split_clients", "charset_map", "match", "lua"})

# nginx's own, or its commercial edition's, that crossplane 0.5.8 has never heard of: read and not judged.
NOT_JUDGED: Final = _words(
    """
    add_trailer_inherit auth_delay bind_conn deny_mgmt enforce_initial_report grpc_ssl_certificate_cache
    grpc_ssl_conf_command http3_hq http3_max_concurrent_streams http3_stream_buffer_size internal_redirect
    js_fetch_trusted_certificate js_import js_var keepalive_time license_token max_headers mgmt num_map otel_exporter
    otel_trace otel_trace_context quic_active_connection_id_limit quic_bpf quic_gso quic_host_key quic_retry
    ssl_certificate_cache ssl_certificate_compression ssl_conf_command ssl_ech_file ssl_key_log
    ssl_object_cache_inheritable ssl_ocsp ssl_ocsp_cache ssl_ocsp_responder ssl_reject_handshake tunnel_allow_upstream
    tunnel_pass usage_report userid_flags uwsgi_ssl_certificate_cache uwsgi_ssl_conf_command
    """
)
# All that the tables here name.
OURS: Final = frozenset({*NOT_JUDGED, *SINCE, *REMOVED, *NEWER_NAMES, *MODULES, *SINGLE, *DEFAULTS})

# What may follow the address of an upstream's server. The last five are commercial, or newer than 1.22.
UPSTREAM_SERVER_FLAGS: Final = _words("backup down resolve drain")
UPSTREAM_SERVER_WORDS: Final = UPSTREAM_SERVER_FLAGS | _words(
    "weight max_conns max_fails fail_timeout service slow_start route"
)

# nginx's own variables, and the beginnings of those that are made up of a name (http_user_agent).
VARIABLE_FAMILIES: Final = (
    "http_", "arg_", "cookie_", "sent_http_", "sent_trailer_", "upstream_", "ssl_", "geoip_", "proxy_protocol_",
    "jwt_", "otel_", "tcpinfo_", "proxy_", "date_", "connections_", "realip_", "sticky_", "acme_",
)  # fmt: skip
VARIABLES: Final = _words(
    """
    args binary_remote_addr body_bytes_sent bytes_sent connection connection_requests
    connection_time content_length content_type document_root document_uri
    fastcgi_path_info fastcgi_script_name gzip_ratio host hostname http2 http3 https invalid_referer is_args
    is_request_port limit_rate limit_conn_status limit_req_status memcached_key modern_browser ancient_browser msec
    msie nginx_version pid pipe proxy_add_x_forwarded_for proxy_host proxy_port query_string quic realpath_root
    remote_addr remote_port remote_user request request_body request_body_file request_completion request_filename
    request_id request_length request_method request_port request_time request_uri scheme secure_link
    secure_link_expires server_addr server_name server_port server_protocol session_log_id slice_range spdy
    spdy_request_priority status time_iso8601 time_local uid_got uid_reset uid_set uri userid
    """
)

# What a location may hand the request to instead of proxy_pass, where answers do not come from our model.
OTHER_PASSES: Final = _words(
    """
    fastcgi_pass uwsgi_pass scgi_pass grpc_pass memcached_pass redis_pass redis2_pass content_by_lua_block
    content_by_lua_file js_content perl echo tunnel_pass
    """
)


def default_of(name: str, version: Version) -> str | None:
    """The value of a directive that no level sets, on this version; None where the table has none."""
    value = DEFAULTS.get(name)
    if not isinstance(value, tuple):
        return value
    return [setting for since, setting in value if version >= since][-1]
