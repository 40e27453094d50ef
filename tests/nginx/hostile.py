"""Files of somebody who wants a checker to run something. CANARY marks what must never reach an nginx; OUTSIDE is a
directory that nobody but the test may touch. Each has a location for the path, so that something could be run."""

from __future__ import annotations

LOCATION = "location / { proxy_pass http://127.0.0.1:9; %s }"
SERVER = "server { listen 127.0.0.1:80; %s }"


def whole(*, main: str = "", http: str = "", server: str = "", location: str = "", target: str = "") -> str:
    """A configuration with these statements at these levels."""
    serving = target or (LOCATION % location)
    return f"{main}\nevents {{ }}\nhttp {{ {http}\n{SERVER % (server + ' ' + serving)}\n}}\n"


# One statement or a few at the top level of the file.
_MAIN = {
    "load-module": "load_module OUTSIDE/CANARY.so;",
    "load-module-quoted": 'load_module "OUTSIDE/CANARY.so" ;',
    "log-syslog": "error_log syslog:server=198.51.100.7:514,tag=CANARY;",
    "pid-daemon-lock": "pid OUTSIDE/CANARY.pid; daemon on; master_process on; lock_file OUTSIDE/CANARY.lock;",
    "user-root": "user root CANARY; worker_processes 4096; worker_priority -20; worker_rlimit_nofile 9999999;",
    "env": "env LD_PRELOAD=OUTSIDE/CANARY.so; env CANARY; working_directory OUTSIDE;",
    "ssl-engine": "ssl_engine CANARY;",
    "mail-and-stream": (
        "mail { auth_http 198.51.100.7/CANARY; server { listen 25; protocol smtp; } }\n"
        "stream { server { listen 0.0.0.0:53 udp; proxy_pass 198.51.100.7:53; } }"
    ),
    "debug": "debug_points abort; timer_resolution 1ms; worker_rlimit_core 9g; thread_pool CANARY threads=9999;",
}
# The same in the location that serves.
_LOCATION = {
    "lua-block": "content_by_lua_block { os.execute('touch OUTSIDE/CANARY') }",
    "dav": "dav_methods PUT DELETE; create_full_put_path on; dav_access all:rw; root OUTSIDE;",
    "store": "proxy_store OUTSIDE/CANARY.bin; proxy_store_access all:rw;",
    "password-file": 'auth_basic "CANARY"; auth_basic_user_file OUTSIDE/CANARY;',
    "break-out-time": 'proxy_read_timeout "60s; include OUTSIDE/CANARY; #";',
    "break-out-size": 'proxy_buffer_size "4k;}}load_module CANARY";',
    "break-out-flag": 'gzip "on; include OUTSIDE/CANARY";',
    "break-out-connection": 'proxy_set_header Connection "close\\";\n include OUTSIDE/CANARY; #";',
    "break-out-header-name": 'add_header "X-Accel-Buffering no; include OUTSIDE/CANARY; #" no;',
    "break-out-header": 'add_header X-Accel-Buffering "no;\n include OUTSIDE/CANARY;";',
    "break-out-types": "gzip on; gzip_types 'text/event-stream;include OUTSIDE/CANARY' text/CANARY;",
    "break-out-sub-filter": "sub_filter '\";} include OUTSIDE/CANARY; {' '$http_CANARY'; sub_filter_types *;",
    "break-out-method": 'proxy_method "GET; include OUTSIDE/CANARY";',
    "break-out-charset": 'charset "utf-8; include OUTSIDE/CANARY";',
    "place-of-a-port": 'proxy_method "@ENGINE@"; proxy_set_header Connection "@HOST@";',
    "memory": (
        "proxy_buffers 1000000 1m; proxy_buffer_size 60g; client_body_buffer_size 60g; "
        "output_buffers 9999999 1m; gzip_buffers 999999 1m; proxy_busy_buffers_size 60g;"
    ),
    "time": "proxy_read_timeout 99999d; proxy_connect_timeout 99999999999999999999999s;",
    "ssi": "ssi on; ssi_types *; set $CANARY OUTSIDE;",
    "set-body": "proxy_set_body $request_body_file;",
}
HOSTILE: dict[str, str] = {
    **{name: whole(main=statements) for name, statements in _MAIN.items()},
    **{name: whole(location=statements) for name, statements in _LOCATION.items()},
    "lua-file": whole(http="init_by_lua_file OUTSIDE/CANARY.lua;", location="access_by_lua_file OUTSIDE/CANARY.lua;"),
    "perl": whole(http="perl_modules OUTSIDE/CANARY; perl_require CANARY.pm;", location="perl CANARY::handler;"),
    "perl-set": whole(http="perl_set $CANARY 'sub { system(\"touch OUTSIDE/CANARY\") }';"),
    "njs": whole(
        http="js_import CANARY from OUTSIDE/CANARY.js; js_set $x CANARY.run;", location="js_body_filter CANARY.b;"
    ),
    "log-paths": whole(
        main="error_log OUTSIDE/CANARY.log debug;",
        http="log_format CANARY '$http_authorization'; access_log OUTSIDE/CANARY-access.log CANARY;",
        location="error_log /etc/CANARY debug; access_log /etc/CANARY; rewrite_log on;",
    ),
    "root-alias": whole(
        server="root OUTSIDE/CANARY; location /CANARY/ { alias OUTSIDE/; autoindex on; }",
        location="root /etc; index passwd;",
    ),
    "temp-paths": whole(
        http="client_body_temp_path OUTSIDE/CANARY; proxy_temp_path /etc/CANARY; client_body_in_file_only on;",
        location="fastcgi_temp_path OUTSIDE/CANARY; uwsgi_temp_path OUTSIDE/CANARY; scgi_temp_path OUTSIDE/CANARY;",
    ),
    "cache": whole(
        http="proxy_cache_path OUTSIDE/CANARY keys_zone=c:1m use_temp_path=off;",
        location="proxy_cache c; proxy_cache_key $http_CANARY;",
    ),
    "listen-everywhere": whole(
        http="server { listen 0.0.0.0:80; listen [::]:80; listen *:81; location / { return 200 CANARY; } }"
    ),
    "listen-unix": whole(server="listen unix:OUTSIDE/CANARY.sock;"),
    "listen-options": whole(server="listen 127.0.0.1:81 proxy_protocol setfib=1 so_keepalive=CANARY backlog=99999999;"),
    "upstream-elsewhere": whole(
        http="upstream CANARY.example { server 198.51.100.7:80; server unix:OUTSIDE/CANARY.sock; keepalive 8; }",
        target="location / { proxy_pass http://CANARY.example; proxy_bind 198.51.100.8 transparent; }",
    ),
    "upstream-unix": whole(target="location / { proxy_pass http://unix:OUTSIDE/CANARY.sock:/; }"),
    "upstream-external": whole(target="location / { proxy_pass https://CANARY.example.com/x; proxy_ssl_name CANARY; }"),
    "resolver": whole(
        server="resolver 198.51.100.53 valid=1s;", target="location / { proxy_pass http://$arg_CANARY; }"
    ),
    "certificates": whole(
        server="listen 127.0.0.1:443 ssl; ssl_certificate OUTSIDE/CANARY.pem; ssl_certificate_key OUTSIDE/CANARY.pem; "
        "ssl_dhparam OUTSIDE/CANARY.pem; ssl_password_file OUTSIDE/CANARY; ssl_session_ticket_key OUTSIDE/CANARY; "
        "ssl_client_certificate OUTSIDE/CANARY.pem; ssl_stapling_file OUTSIDE/CANARY; ssl_conf_command CANARY x;",
        location="proxy_ssl_certificate OUTSIDE/CANARY.pem; proxy_ssl_trusted_certificate OUTSIDE/CANARY.pem; "
        "proxy_ssl_crl OUTSIDE/CANARY.pem; proxy_ssl_conf_command CANARY x;",
    ),
    "break-out-keepalive": whole(
        http='upstream "p;CANARY" { server 127.0.0.1:9; keepalive "8; include OUTSIDE/CANARY"; }',
        target='location / { proxy_pass "http://p;CANARY"; }',
    ),
    "break-out-map": whole(
        http="map $http_upgrade $c { default 'upgrade\";include OUTSIDE/CANARY;'; '' 'close;include OUTSIDE/CANARY'; }",
        location="proxy_set_header Connection $c;",
    ),
    "break-out-names": whole(
        server='server_name "a;include OUTSIDE/CANARY;" CANARY;',
        target='location "/;include OUTSIDE/CANARY" { } location / { proxy_pass http://127.0.0.1:9; }',
    ),
    "mirror": whole(server="location /m { internal; proxy_pass http://198.51.100.7/CANARY; }", location="mirror /m;"),
    "auth-request": whole(server="location /a { proxy_pass http://CANARY.example; }", location="auth_request /a;"),
    "image-geo": whole(http="geoip_country OUTSIDE/CANARY.dat;", location="image_filter resize 9999 9999;"),
    "plugin": whole(main="google_perftools_profiles OUTSIDE/CANARY;", location="CANARY_module_run OUTSIDE/CANARY;"),
}
