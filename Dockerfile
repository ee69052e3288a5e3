# Images of the services: `core` (no torch), `executor-cpu`, `kv` (LMCache and Redis beside it), `executor-cuda`.
# What changes least comes first: dependencies of a target are a layer of their own, the code is the last one.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS lists
# What pyproject.toml asks for, a list for each target: a change elsewhere in that file installs nothing again.
COPY pyproject.toml /
RUN python -c "import pathlib, tomllib; \
t = tomllib.load(open('/pyproject.toml', 'rb')); p = t['project']; \
write = lambda name, items: pathlib.Path('/' + name).write_text('\\n'.join(items)); \
write('core.txt', t['build-system']['requires'] + p['dependencies']); \
[write(e + '.txt', p['optional-dependencies'][e]) for e in ('executor', 'kv')]"

FROM ${PYTHON_IMAGE} AS base
# How pip reaches its packages, for networks with an index of their own: docker build --build-arg PIP_INDEX_URL=...
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# A named volume takes the owner of the folder that it is first mounted on.
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin headrace \
 && mkdir -m 0700 /cache /data /auth /kernels \
      /auth/{nats,tokenizer,scheduler,executor,kv_offload,detokenizer,gateway,keeper,operator,tenants} \
 && chown -R headrace:headrace /cache /data /auth /kernels
WORKDIR /app
COPY constraints.txt constraints-cuda.txt ./
COPY --from=lists /core.txt /tmp/
RUN pip install -c constraints.txt -r /tmp/core.txt

FROM base AS executor-cpu-base
# An index of CPU builds; without it torch comes as pip is configured, with CUDA on most.
ARG TORCH_INDEX_URL
RUN pip install -c constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY --from=lists /executor.txt /tmp/
RUN pip install -c constraints.txt -r /tmp/executor.txt

FROM executor-cpu-base AS kv-base
COPY --from=lists /kv.txt /tmp/
RUN pip install -c constraints.txt -r /tmp/kv.txt

FROM base AS executor-cuda-base
# Triton compiles what starts its kernels with a C compiler, and maps it from its cache: /tmp is mounted noexec.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV CC=gcc TRITON_CACHE_DIR=/kernels
COPY --from=lists /executor.txt /tmp/
RUN pip install -c constraints-cuda.txt -r /tmp/executor.txt triton

FROM base AS core
COPY . .
RUN pip install --no-deps --no-build-isolation .
USER 10001:10001
ENTRYPOINT ["headrace"]
CMD ["--help"]

FROM executor-cpu-base AS executor-cpu
COPY . .
RUN pip install --no-deps --no-build-isolation .
USER 10001:10001
ENTRYPOINT ["headrace"]
CMD ["serve", "executor"]

FROM kv-base AS kv
COPY . .
RUN pip install --no-deps --no-build-isolation .
USER 10001:10001
ENTRYPOINT ["headrace"]
CMD ["serve", "kv_offload"]

FROM executor-cuda-base AS executor-cuda
COPY . .
RUN pip install --no-deps --no-build-isolation .
USER 10001:10001
ENTRYPOINT ["headrace"]
CMD ["serve", "executor"]
