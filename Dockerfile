# Bridge and vLLM for NVIDIA GPUs. Not built or run yet: no Docker and no GPU were at hand.
#     docker build -t bridge .
#     docker run --rm --gpus all --ipc=host --cap-add=SYS_PTRACE bridge doctor
ARG CUDA=13.0.1-devel-ubuntu24.04
FROM nvidia/cuda:${CUDA}

# Triton compiles kernels when they first run, which takes a compiler and Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv build-essential \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/bridge
ENV PATH=/opt/bridge/bin:${PATH}

COPY . /src
RUN cd /src && pip install --no-cache-dir '.[gpu]'

# Mount a volume here: runs, checkpoints and downloaded models are written below it.
WORKDIR /bridge
ENV HF_HOME=/bridge/huggingface
ENTRYPOINT ["bridge"]
CMD ["--help"]
