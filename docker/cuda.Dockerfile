# An image for NVIDIA GPUs; the host needs a driver for CUDA 13 (580 or newer) and the NVIDIA Container Toolkit:
#   docker build -f docker/cuda.Dockerfile --build-arg COMMIT="$(git rev-parse HEAD)" -t depthlm:cuda .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/outputs:/depthlm/outputs" -v "$PWD/data/tokens:/depthlm/data/tokens" \
#     depthlm:cuda train.py size=360m
# nvcc, for DeepSpeed's CPU optimizer (deepspeed=zero3_offload); everything else needs only torch's own CUDA libraries
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# Triton compiles its launcher with a C compiler and Python's headers
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ ninja-build python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:$PATH

WORKDIR /depthlm
# the packages change less often than the code, so they are a layer of their own
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY depthlm/__init__.py depthlm/
RUN pip install --no-cache-dir --constraint constraints.txt setuptools wheel \
 && pip install --no-cache-dir --constraint constraints.txt torch \
 && DS_BUILD_OPS=0 pip install --no-cache-dir --constraint constraints.txt --editable ".[evaluation,kimi,trackers]"
COPY . .

# the commit, for environment.json of a run; and a home for the caches of any user (docker run --user)
ARG COMMIT=
RUN if [ -n "$COMMIT" ]; then echo "{\"commit\": \"$COMMIT\", \"changed\": false}" > git.json; fi \
 && mkdir -m 777 /home/depthlm
ENV HOME=/home/depthlm
ENTRYPOINT ["python"]
CMD ["train.py", "--help"]
