# syntax=docker/dockerfile:1
# Images of the three services: one --target each.
#
#   docker build --target coordinator   -t outrider-coordinator .
#   docker build --target draft-worker  -t outrider-draft-worker .
#   docker build --target verify-worker -t outrider-verify-worker .
#
# For GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130; torch brings the CUDA
# libraries, the node its driver. BASE may be any image with Python 3.11; pin it by digest
# (--build-arg BASE=…@sha256:…) where builds have to be the same bit by bit. Verify workers on
# several hosts need --build-arg EXTRAS=[ray].
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm
ARG GO=docker.io/library/golang:1.25.5-alpine3.22

FROM ${GO} AS health
# Go's checksum database vouches for what the versions mean, that of Go itself included.
ENV CGO_ENABLED=0 GOTOOLCHAIN=auto
RUN go install -trimpath -ldflags=-s \
    github.com/grpc-ecosystem/grpc-health-probe@v0.4.62

# hadolint ignore=DL3006
FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
WORKDIR /src
RUN python -m venv /opt/outrider
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY outrider outrider
COPY coordinator coordinator
COPY draft_worker draft_worker
COPY verify_worker verify_worker
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/outrider/bin/pip install --disable-pip-version-check -c constraints.txt \
    --extra-index-url "${TORCH_INDEX}" ".${EXTRAS}" \
    && /opt/outrider/bin/python -m compileall -q /opt/outrider/lib

# No compiler, no sources, no pip cache.
# hadolint ignore=DL3006
FROM ${BASE} AS runtime
RUN groupadd --gid 10001 outrider \
    && useradd --uid 10001 --gid outrider --home-dir /cache --no-log-init --shell /usr/sbin/nologin outrider \
    && install -d -o 10001 -g 10001 /cache
COPY --from=build /opt/outrider /opt/outrider
COPY --from=health /go/bin/grpc-health-probe /usr/local/bin/grpc_health_probe
ENV PATH=/opt/outrider/bin:$PATH \
    HOME=/cache \
    NUMBA_CACHE_DIR=/cache/numba \
    HF_HUB_OFFLINE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /cache
ENTRYPOINT ["outrider"]

FROM runtime AS coordinator
EXPOSE 7070 9464
CMD ["coordinator", "--host=0.0.0.0"]

FROM runtime AS verify-worker
EXPOSE 7071 9464
CMD ["verify-worker", "--host=0.0.0.0", "--port=7071"]

FROM runtime AS draft-worker
EXPOSE 7072 9464
CMD ["draft-worker", "--host=0.0.0.0", "--port=7072"]
