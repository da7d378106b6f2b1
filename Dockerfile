# CPU:   docker build -t hybridtrain .
# CUDA:  docker build -t hybridtrain:cuda --build-arg TORCH=cuda .
# Run:   docker run --rm -v "$PWD/runs:/home/trainer/outputs" hybridtrain trainer.devices=4
#        (with a GPU: docker run --rm --gpus all hybridtrain:cuda)
# Docker's default /dev/shm of 64 MB is enough: parameters lie in anonymous memory (memfd), not there.
# Only loader processes (data.num_workers above 0) use it; give them more with --shm-size=1g.
FROM python:3.11-slim-bookworm

# cpu or cuda. The CUDA build brings its own libraries; the host needs NVIDIA's driver and container toolkit.
ARG TORCH=cpu

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

WORKDIR /opt/hybridtrain

# torch alone, in a layer of its own: it is large and rarely changes.
COPY constraints.txt ./
RUN set -eu; \
    torch="$(grep '^torch==' constraints.txt)"; \
    case "$TORCH" in \
      cpu) pip install --quiet --no-deps --timeout 30 --retries 2 --extra-index-url https://download.pytorch.org/whl/cpu "$torch+cpu" ;; \
      cuda) pip install --quiet --constraint constraints.txt "$torch" ;; \
      *) echo "TORCH=$TORCH: give cpu or cuda" >&2; exit 1 ;; \
    esac

COPY pyproject.toml README.md LICENSE ./
COPY hybridtrain ./hybridtrain
COPY conf ./conf
RUN pip install --quiet --constraint constraints.txt '.[all]'

# The program needs no rights: it writes below its home only.
RUN useradd --create-home --uid 1000 trainer && mkdir /home/trainer/outputs && chown trainer: /home/trainer/outputs
USER trainer
WORKDIR /home/trainer

ENTRYPOINT ["python", "-m", "hybridtrain"]
CMD ["--help"]
