# Tidemark's images, built by `make image`:
#
#   services   storage, broker, lifecycle and the command `tidemark`
#   spark      the same with PySpark and Java, for retention and eviction
#
# All packages come from the hashed locks in requirements/. Containers run as user 10001 and write only
# to /var/lib/tidemark and /tmp, so the root file system can be read-only. The command selects the
# service, such as `python -m storage_svc`; TIDEMARK_* variables configure it.

ARG BASE=docker.io/library/python:3.11-slim-bookworm

# --- the environment, with the tools that make it ---------------------------------------------
FROM ${BASE} AS build
# Another package index: --build-arg UV_DEFAULT_INDEX=...
ARG UV_DEFAULT_INDEX
ENV UV_LINK_MODE=copy UV_NO_CACHE=1 UV_PYTHON=/opt/tidemark/bin/python
WORKDIR /src
COPY requirements/bootstrap.txt requirements/
RUN python -m venv /opt/tools \
    && /opt/tools/bin/pip install --no-cache-dir --require-hashes \
        ${UV_DEFAULT_INDEX:+--index-url "$UV_DEFAULT_INDEX"} -r requirements/bootstrap.txt \
    && python -m venv --without-pip /opt/tidemark
COPY requirements/base.txt requirements/
# Compiled here, because a read-only file system allows no byte code later.
RUN /opt/tools/bin/uv pip install --compile-bytecode --require-hashes -r requirements/base.txt

FROM build AS package
COPY . .
RUN /opt/tools/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM build AS build-services
COPY --from=package /wheels /wheels
RUN /opt/tools/bin/uv pip install --compile-bytecode --no-deps /wheels/*.whl

FROM build AS build-spark
COPY requirements/spark.txt requirements/
RUN /opt/tools/bin/uv pip install --compile-bytecode --require-hashes -r requirements/spark.txt
COPY --from=package /wheels /wheels
RUN /opt/tools/bin/uv pip install --compile-bytecode --no-deps /wheels/*.whl

# --- what runs --------------------------------------------------------------------------------
FROM ${BASE} AS runtime
RUN groupadd --gid 10001 tidemark \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp \
        --shell /usr/sbin/nologin tidemark \
    && install --directory --owner 10001 --group 10001 /var/lib/tidemark
ENV PATH=/opt/tidemark/bin:$PATH \
    HOME=/tmp \
    GRPC_VERBOSITY=ERROR \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TIDEMARK_STORAGE_DATA_DIR=/var/lib/tidemark/data
USER 10001:10001
WORKDIR /tmp
VOLUME /var/lib/tidemark
EXPOSE 7400 7410 7420 7430
# Checks the health of the service in this container, found by its settings.
HEALTHCHECK --start-period=60s --interval=10s --timeout=5s CMD ["python", "-m", "tidemark.probe"]
CMD ["python", "-m", "broker_svc"]

FROM runtime AS spark
COPY --from=build-spark /opt/tidemark /opt/tidemark
CMD ["python", "-m", "spark_batch", "serve"]

FROM runtime AS services
COPY --from=build-services /opt/tidemark /opt/tidemark
