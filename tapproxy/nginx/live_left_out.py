"""What a live check leaves out of a user's file, and why.

Rules here: a directive with a row in ``live_settings`` is run. Of the others a table says that it was followed before
anything ran (``RESOLVED``), that it has no bearing on when the bytes of a proxied answer pass (``HARMLESS``), or why it
is not run though it has (``BECAUSE``). What no table knows may have a bearing, and is said.
"""

from __future__ import annotations

import re
from typing import Final


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Why these are not run although they bear on a stream.
BECAUSE: Final[dict[str, str]] = {
    "mirror": "it sends every prompt to a second upstream",
    "auth_request": "it asks another upstream before each request; its time adds to the first token",
    "auth_basic": "it refuses clients without a password",
    "auth_jwt": "it refuses clients without a token",
    "allow": "it lets in some clients only",
    "deny": "it refuses some clients",
    "limit_req": "it delays or refuses requests that come together; one at a time is measured",
    "limit_conn": "it refuses requests that come together; one at a time is measured",
    "proxy_cache": "it stores answers and may give them to others",
    "proxy_store": "it writes answers to a path of the file",
    "addition_types": "what it adds comes from another location",
    "add_before_body": "what it adds comes from another location",
    "add_after_body": "what it adds comes from another location",
    "proxy_next_upstream": "it acts when a replica fails, and none does here",
    "proxy_set_body": "it replaces the prompt by a text of the file",
    "load_module": "a module is code",
    "proxy_bind": "it chooses an address of this host",
    "worker_connections": "it is felt when many streams are open at once",
    "max_conns": "it refuses requests that come together; one at a time is measured",
}
# These, and whatever begins so, are code.
CODE: Final = (
    "lua_", "js_", "perl", "njs", "wasm", "content_by_", "access_by_", "rewrite_by_", "header_filter_by_",
    "body_filter_by_", "set_by_", "log_by_", "init_by_", "init_worker_by_", "balancer_by_",
)  # fmt: skip
# Followed by the model before anything is run, or replaced by what is our own here.
RESOLVED: Final = _words(
    """
    http events server location upstream map geo split_clients types if limit_except include set rewrite return break
    try_files error_page internal rewrite_log listen server_name proxy_pass root alias index satisfy
    default_type resolver resolver_timeout merge_slashes absolute_redirect port_in_redirect server_name_in_redirect
    auth_basic_user_file ssl http2 variables_hash_max_size variables_hash_bucket_size
    """
)
# Has no bearing on when the bytes of a proxied answer pass.
HARMLESS: Final = _words(
    """
    user worker_processes worker_cpu_affinity worker_priority worker_rlimit_nofile worker_rlimit_core pid daemon
    master_process error_log env lock_file debug_points timer_resolution working_directory pcre_jit thread_pool
    multi_accept accept_mutex accept_mutex_delay use debug_connection worker_aio_requests
    access_log log_format log_not_found log_subrequest open_log_file_cache server_tokens types_hash_max_size
    types_hash_bucket_size server_names_hash_max_size server_names_hash_bucket_size map_hash_max_size
    map_hash_bucket_size large_client_header_buffers client_header_buffer_size client_header_timeout
    client_body_in_file_only client_body_temp_path ignore_invalid_headers underscores_in_headers
    proxy_headers_hash_max_size proxy_headers_hash_bucket_size proxy_temp_path proxy_redirect proxy_cookie_domain
    proxy_cookie_path proxy_cookie_flags proxy_force_ranges proxy_pass_trailers proxy_next_upstream_timeout
    proxy_next_upstream_tries proxy_intercept_errors proxy_store_access proxy_no_cache proxy_allow_upgrade
    limit_req_zone limit_req_status limit_req_log_level limit_conn_zone limit_conn_status limit_conn_log_level
    aio aio_write directio directio_alignment sendfile_max_chunk open_file_cache open_file_cache_errors
    open_file_cache_min_uses open_file_cache_valid read_ahead disable_symlinks expires etag if_modified_since
    max_ranges msie_padding msie_refresh recursive_error_pages keepalive_disable keepalive_time keepalive_min_timeout
    lingering_close lingering_time lingering_timeout connection_pool_size request_pool_size postpone_gzipping
    override_charset source_charset charset_map gzip_static gzip_hash gzip_window gzip_no_buffer
    real_ip_header real_ip_recursive set_real_ip_from stub_status autoindex uninitialized_variable_warn
    http2_max_concurrent_streams http2_body_preread_size http2_recv_buffer_size http2_max_requests http2_idle_timeout
    http2_recv_timeout http2_max_field_size http2_max_header_size http2_push http2_push_preload http3 http3_hq
    worker_shutdown_timeout mirror_request_body auth_request_set add_header_inherit add_trailer early_hints
    ssi_silent_errors ssi_last_modified ssi_min_file_chunk ssi_value_length subrequest_output_buffer_size
    output_header zone random hash sticky state queue ntlm least_time stream mail google_perftools_profiles
    acme_issuer status_zone valid_referers referer_hash_bucket_size referer_hash_max_size limit_req_dry_run
    limit_conn_dry_run http2_max_concurrent_pushes empty_gif random_index create_full_put_path min_delete_depth
    proxy_cache_path proxy_cache_key proxy_cache_valid proxy_cache_methods proxy_cache_lock proxy_cache_bypass
    proxy_cache_min_uses proxy_cache_use_stale proxy_cache_revalidate proxy_cache_background_update
    proxy_cache_lock_age proxy_cache_lock_timeout proxy_cache_max_range_offset proxy_cache_purge
    proxy_cache_convert_head
    """
)
HARMLESS_FAMILIES: Final = (
    "ssl_", "proxy_ssl_", "fastcgi_", "uwsgi_", "scgi_", "grpc_", "memcached_", "geoip", "quic_", "dav_",
    "image_filter", "mp4", "flv", "log_", "autoindex_", "userid", "secure_link", "ancient_browser", "modern_browser",
)  # fmt: skip


def because(name: str, arguments: tuple[str, ...], *, replicas: int) -> str | None:
    """Why a directive that is in no row is not run; None where that changes nothing.

    ``replicas``: how many servers the pool has; with one there is no next.
    """
    if name in BECAUSE and arguments[:1] == ("off",):
        return None
    if name == "proxy_next_upstream":
        return BECAUSE[name] if replicas > 1 else None
    if name == "worker_connections":
        number = arguments[0] if arguments else ""
        return BECAUSE[name] if re.fullmatch(r"\d{1,2}", number) else None
    if name in BECAUSE:
        return BECAUSE[name]
    if name.startswith(CODE):
        return "it is code"
    if name in RESOLVED or name in HARMLESS or name.startswith(HARMLESS_FAMILIES):
        return None
    return "it is not among the settings that are run"
