# An image that serves a model; the model itself is mounted.
#
#   docker build --build-arg TORCH_INDEX=URL --tag antiphon:cpu .
#   docker build --build-arg VARIANT=cuda --tag antiphon:cuda .
#   docker run --rm --read-only --tmpfs /tmp -p 50051:50051 -v "$PWD/runs/notes/model:/model:ro" antiphon:cpu
#
# URL is the package index with PyTorch's CPU builds, which PyTorch's own installation page tells. The
# usual index has builds for CUDA on x86-64, which bring CUDA along: no base image with it is needed.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS packages
ARG VARIANT=cpu
ARG TORCH_INDEX=
ENV PATH=/opt/antiphon/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_INPUT=1
WORKDIR /source
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# hadolint ignore=DL3059
RUN python -m venv /opt/antiphon
COPY deploy/requirements.txt deploy/
# First and by itself: it is nearly all of the image, and changes least often.
# hadolint ignore=DL3013
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch' deploy/requirements.txt)"
RUN pip install --requirement deploy/requirements.txt
# hadolint ignore=DL3059
RUN python -c "import sys, torch; built = 'cuda' if torch.version.cuda else 'cpu'; \
wanted = sys.argv[1]; sys.exit(None if built == wanted else \
f'torch {torch.__version__} is built for {built}, the image is for {wanted}: give TORCH_INDEX')" \
    "$VARIANT"
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY protos protos
COPY gpt gpt
COPY serve serve
# What training needs is left out, so pip must not look for it. The kernels are compiled here, as the
# image has no compiler; -P has Python take the installed package, not this folder's.
RUN pip install --no-deps . && python -P -m gpt.native.build \
    && pip uninstall --yes pip && antiphon serve --help >/dev/null

FROM python:${PYTHON}-slim
# A number, so that Kubernetes can see that it is not root.
ARG USER_ID=10001
COPY --from=packages /opt/antiphon /opt/antiphon
# The root may be read-only: what libraries want to leave somewhere goes to /tmp.
ENV PATH=/opt/antiphon/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER ${USER_ID}:${USER_ID}
WORKDIR /tmp
EXPOSE 50051 9464
# SIGTERM, which Docker sends, drains; give it the time: docker stop --time.
STOPSIGNAL SIGTERM
ENTRYPOINT ["antiphon"]
# No ANTIPHON_SERVE_ variables above: they would go before a settings file.
CMD ["serve", "/model", "--host", "0.0.0.0"]
