#!/usr/bin/env bash
# Starts the image as the chart does (no rights, read-only root) and sends a message through it.
# Usage: image-smoke.sh CONTAINER_TOOL IMAGE
set -euo pipefail

tool=$1 image=$2
name=tidemark-smoke-$$
confined=(--read-only --tmpfs /tmp:exec --cap-drop ALL --security-opt no-new-privileges
    --network "$name" --env TIDEMARK_STORAGE_ADDRESSES=storage:7410
    --env TIDEMARK_LIFECYCLE_ADDRESS=lifecycle:7420)

clean_up() {
    "$tool" rm --force "$name-storage" "$name-lifecycle" "$name-broker" >/dev/null 2>&1 || true
    "$tool" volume rm "$name" >/dev/null 2>&1 || true
    "$tool" network rm "$name" >/dev/null 2>&1 || true
}
trap clean_up EXIT

start() { # SERVICE PORT [MORE OPTIONS...]
    local service=$1 port=$2
    shift 2
    local upper=${service^^}
    "$tool" run --detach --name "$name-$service" --network-alias "$service" "${confined[@]}" \
        --env "TIDEMARK_${upper}_LISTEN=0.0.0.0:$port" \
        --env "TIDEMARK_${upper}_ADVERTISE=$service:$port" \
        "$@" "$image" python -m "${service}_svc" >/dev/null
}

"$tool" network create "$name" >/dev/null
"$tool" volume create "$name" >/dev/null
start storage 7410 --volume "$name:/var/lib/tidemark"
start lifecycle 7420
start broker 7400
"$tool" run --rm "${confined[@]}" "$image" python -m tidemark.smoke broker:7400 || {
    for service in storage lifecycle broker; do
        "$tool" logs "$name-$service" 2>&1 | tail -20
    done
    exit 1
}
for service in storage lifecycle broker; do # what the image's HEALTHCHECK runs
    "$tool" exec "$name-$service" python -m tidemark.probe
done
