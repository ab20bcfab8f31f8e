# The one binary and what it loads. From the root of the repository:
#   docker build -t prime-rl-cpp:main .                       for CPUs
#   docker build -t prime-rl-cpp:main --build-arg CUDA=1 .    with kernels for NVIDIA GPUs; --build-arg CUDA_ARCH="80;90a" for others than H100 and H200
ARG CUDA=0
FROM debian:bookworm AS toolkit-0
RUN mkdir -p /usr/local/cuda/lib64 && touch /usr/local/cuda/lib64/libcublasLt.so.none
FROM nvidia/cuda:13.0.1-devel-ubuntu22.04 AS toolkit-1
FROM toolkit-${CUDA} AS toolkit

FROM debian:bookworm AS build
ARG CUDA=0
ARG CUDA_ARCH=90a
COPY --from=toolkit /usr/local/cuda /usr/local/cuda
WORKDIR /src
COPY tools/setup.sh tools/setup.sh
RUN apt-get update && tools/setup.sh
COPY . .
RUN export PATH="$PATH:/usr/local/cuda/bin" \
    && cmake --preset release -B build/release -DPRL_CUDA=$([ "$CUDA" = 1 ] && echo on || echo off) -DPRL_CUDA_ARCH="$CUDA_ARCH" \
    && cmake --build build/release --target prl \
    && strip build/release/bin/prl

FROM debian:bookworm-slim
# Libraries of the binary, certificates for downloads from the hub, and Python for environments that are written in it.
RUN apt-get update && apt-get install -y --no-install-recommends \
      libzmq5 libpcre2-8-0 libsnappy1v5 libzstd1 libyaml-0-2 libpng16-16 libjpeg62-turbo zlib1g libssl3 libboost-json1.81.0 libfmt9 libxxhash0 libgloo0 \
      ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=toolkit /usr/local/cuda/lib64/libcublasLt.so.* /usr/local/lib/
COPY --from=build /src/build/release/bin/prl /usr/local/bin/prl
RUN ldconfig && ! ldd /usr/local/bin/prl | grep "not found"
WORKDIR /app
COPY configs configs
COPY k8s k8s
ENTRYPOINT []
CMD ["prl", "--help"]
