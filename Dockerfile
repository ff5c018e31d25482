# `quire serve` on a CPU. Everything is installed from wheels; only the first stage has a compiler.
#   docker build --tag quire .
# PyPI's torch brings CUDA's libraries. For torch without them, name PyTorch's index of CPU wheels:
#   docker build --tag quire --build-arg PIP_EXTRA_INDEX_URL=URL .
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# Quire's own wheel, then the wheels that it names. Without a compiler the first would have no
# native kernels, so the file is checked.
RUN pip wheel --no-deps --wheel-dir /wheels . \
    && python -m zipfile --list /wheels/quire_engine-*.whl | grep native/_native.so \
    && pip wheel --only-binary :all: --wheel-dir /wheels /wheels/quire_engine-*.whl

FROM python:${PYTHON}-slim
# Triton is for GPUs, and torch's headers and its own tests are a sixth of the rest. A volume at
# .cache, for models and packed weights, gets the owner that the folder has here.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index /wheels/*.whl \
    && pip uninstall --yes triton \
    && torch=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch \
    && rm -rf "$torch/include" "$torch/test" "$torch"/bin/test_* "$torch"/bin/protoc* \
    && useradd --uid 10001 --create-home --home-dir /quire quire \
    && install --directory --owner 10001 --group 10001 /quire/.cache
USER 10001:10001
WORKDIR /quire
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://localhost:8000/health/ready')"]
ENTRYPOINT ["quire"]
CMD ["serve", "--host=0.0.0.0"]
