#!/bin/sh
# Installs the system packages the tests use: a Chromium that opens the HTML report, Prometheus with
# its promtool, which judges what /metrics shows, Alertmanager with its amtool, a library that vLLM for
# CPUs is linked with, and bubblewrap, in which the example of a Python tool runs programs.
set -eu

has_any() {
    for program in "$@"; do
        if command -v "$program" >/dev/null 2>&1; then return 0; fi
    done
    return 1
}

missing=""
has_any chromium chromium-browser google-chrome || missing="$missing chromium"
has_any promtool || missing="$missing prometheus"
has_any amtool || missing="$missing prometheus-alertmanager"
ldconfig -p 2>/dev/null | grep -q 'libnuma\.so\.1' || [ "$(uname)" != Linux ] || missing="$missing libnuma1"
has_any bwrap || [ "$(uname)" != Linux ] || missing="$missing bubblewrap"
if [ -z "$missing" ]; then exit 0; fi

if has_any apt-get && [ "$(id -u)" = 0 ]; then
    echo "Installing$missing (about one minute)"
    apt-get update -qq
    # shellcheck disable=SC2086 - the list is meant to be split
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $missing >/dev/null
else
    echo "Not found:$missing. The tests that need them are skipped. Fix: install them." >&2
fi
