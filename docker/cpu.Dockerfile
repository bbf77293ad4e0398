# An image for machines without a GPU:
#   docker build -f docker/cpu.Dockerfile --build-arg COMMIT="$(git rev-parse HEAD)" -t depthlm:cpu .
#   docker run --rm -v "$PWD/outputs:/depthlm/outputs" -v "$PWD/data/tokens:/depthlm/data/tokens" depthlm:cpu train.py
FROM python:3.12-slim-bookworm

# torch.compile needs g++
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

WORKDIR /depthlm
# the packages change less often than the code, so they are a layer of their own
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY depthlm/__init__.py depthlm/
RUN pip install --no-cache-dir --constraint constraints.txt setuptools wheel \
 && pip install --no-cache-dir --constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
 && DS_BUILD_OPS=0 pip install --no-cache-dir --constraint constraints.txt --editable ".[evaluation,trackers]"
COPY . .

# the commit, for environment.json of a run; and a home for the caches of any user (docker run --user)
ARG COMMIT=
RUN if [ -n "$COMMIT" ]; then echo "{\"commit\": \"$COMMIT\", \"changed\": false}" > git.json; fi \
 && mkdir -m 777 /home/depthlm
ENV HOME=/home/depthlm
ENTRYPOINT ["python"]
CMD ["train.py", "--help"]
