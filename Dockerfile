# syntax=docker/dockerfile:1
# The image of a machine with NVIDIA GPUs: `make image`. docs/guides/clusters.md has the commands to run it.
#
# CUDA's libraries come with Python packages (requirements/gpu.txt), so the last stage begins with a plain system. The
# first needs nvcc for FlashAttention; FLASH_ATTN_CUDA_ARCHS are the GPUs it is compiled for, MAX_JOBS bounds memory.
ARG UBUNTU=ubuntu:noble-20250714
ARG CUDA=nvidia/cuda:13.0.2-devel-ubuntu24.04

FROM ${CUDA} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/nemo_offload_rl
COPY Makefile pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY nemo_offload_rl nemo_offload_rl
ARG MAX_JOBS=8
ARG FLASH_ATTN_CUDA_ARCHS=90;100
ENV MAX_JOBS=${MAX_JOBS} FLASH_ATTN_CUDA_ARCHS=${FLASH_ATTN_CUDA_ARCHS} CUDA_HOME=/usr/local/cuda
# There is no GPU and no driver in a build, so that the imports at its end may lack that alone.
RUN --mount=type=cache,target=/root/.cache make setup-gpu flash-attn BUILD_ARGUMENTS=--no-driver

FROM ${UBUNTU}
# A C compiler and Python's headers stay: Triton and torch.compile compile at run time. KubeRay's probes use wget, and its
# pods begin with a login shell.
# hadolint ignore=DL3008,SC2016
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates gcc libc6-dev libnuma1 python3 python3-dev wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 trainer \
    && echo 'export PATH=/opt/nemo_offload_rl/.venv/bin:$PATH' > /etc/profile.d/nemo_offload_rl.sh
WORKDIR /opt/nemo_offload_rl
COPY --from=build --chown=trainer:trainer /opt/nemo_offload_rl/.venv .venv
COPY --chown=trainer:trainer pyproject.toml README.md LICENSE ./
COPY --chown=trainer:trainer nemo_offload_rl nemo_offload_rl
COPY --chown=trainer:trainer examples examples
ENV PATH=/opt/nemo_offload_rl/.venv/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1001
CMD ["bash"]
