# edgepool on a datacenter GPU, or on a CPU alone.
#
#   docker build $(edgepool docker-args --target h100) -t edgepool .
#   docker build $(edgepool docker-args --target cpu) -t edgepool .
#
# Without arguments it is for every GPU from A100 to Blackwell. The stages and arguments are those of
# Dockerfile.jetson, which says what they are; only what the arguments are by default differs.
ARG BASE_IMAGE=nvcr.io/nvidia/tensorrt:26.05-py3
ARG RUNTIME_IMAGE=${BASE_IMAGE}

FROM ${BASE_IMAGE} AS tools
WORKDIR /context
COPY jetson/image/tools.sh jetson/requirements-build.txt jetson/
ARG PYTHON=3.12
RUN sh jetson/tools.sh

FROM tools AS packages
COPY . .
ARG PLUGINS=build
ARG REQUIREMENTS=jp7
RUN sh jetson/image/packages.sh

FROM packages AS plugins
ARG PLUGINS=build
ARG ARCHITECTURES=80-real,86-real,89-real,90-real,100-real,120
ARG CUDA=13.2
ARG TENSORRT=10.16.1.11
RUN sh jetson/image/plugins.sh

FROM ${RUNTIME_IMAGE} AS runtime
ARG RUNTIME_IMAGE
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="edgepool" \
      org.opencontainers.image.description="Long-context language models on ONNX Runtime and TensorRT" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.base.name="${RUNTIME_IMAGE}"
COPY --from=plugins /opt/edgepool /opt/edgepool
COPY jetson/image/runtime.sh /opt/edgepool/image/
COPY jetson/entrypoint /usr/local/bin/edgepool-entrypoint
RUN sh /opt/edgepool/image/runtime.sh
ENV PATH=/opt/edgepool/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    EDGEPOOL_CACHE=/cache
VOLUME ["/models", "/cache"]
WORKDIR /home/edgepool
USER 10001
# The bundle is there and readable; `edgepool-entrypoint check` is the long check, of GPU and engine.
HEALTHCHECK --interval=5m --timeout=30s CMD ["edgepool", "inspect", "/models"]
ENTRYPOINT ["edgepool-entrypoint"]
CMD ["check"]
