# A tap in a container: no root, no shell tools needed, the root file system may be read-only.
#
#   docker build -t tapproxy .
#   docker run --read-only --cap-drop ALL --network host -v tapproxy-data:/data tapproxy \
#       serve --upstream http://127.0.0.1:8000
#
# Without --network host, give `--listen 0.0.0.0:9000` and publish that port. The admin port stays on the
# container's loopback unless you give it `--admin 0.0.0.0:9001` and a token (-e TAPPROXY_ADMIN_TOKEN).

FROM python:3.12-slim AS build
WORKDIR /src
# Without a compiler the data path would be pure Python, and cost half as much again.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY tapproxy tapproxy
COPY nginx nginx
# Byte code is made here: a read-only root has no place for it later.
RUN python -m venv /opt/tapproxy \
 && /opt/tapproxy/bin/pip install --no-cache-dir . \
 && /opt/tapproxy/bin/python -m compileall -q /opt/tapproxy/lib

FROM python:3.12-slim
ENV PATH=/opt/tapproxy/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin tapproxy \
 && install -d -o tapproxy -g tapproxy -m 0700 /data
COPY --from=build /opt/tapproxy /opt/tapproxy
USER 10001:10001
# Records go to ./tapproxy-data, so into this volume.
WORKDIR /data
VOLUME /data
STOPSIGNAL SIGTERM
# Another --admin port needs another --health-cmd.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9001/healthz', timeout=2)"]
ENTRYPOINT ["tapproxy"]
CMD ["--help"]
