#!/bin/sh
# Installs the one system package the tests use: a Chromium that opens the HTML report.
set -eu
for browser in chromium chromium-browser google-chrome; do
    if command -v "$browser" >/dev/null 2>&1; then exit 0; fi
done
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    echo "Installing chromium (the report's test opens it; about one minute)"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends chromium >/dev/null
else
    echo "No Chromium found: the report's browser test will be skipped. Cure: install chromium." >&2
fi
