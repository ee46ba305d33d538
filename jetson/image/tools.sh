#!/bin/sh
# What compiles and installs, in /opt/tools; nothing of it reaches the image that runs.
# Takes PYTHON, the version that the base image should have.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends g++ python3-dev python3-pip python3-venv
rm -rf /var/lib/apt/lists/*

found=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$found" != "$PYTHON" ]; then
  echo "error: the base image has Python $found, not $PYTHON: give PYTHON and REQUIREMENTS that fit," \
    "or another BASE_IMAGE" >&2
  exit 1
fi

python3 -m venv /opt/tools
pip="/opt/tools/bin/python -m pip --disable-pip-version-check --no-cache-dir"
$pip install --quiet "$(grep '^pip==' jetson/requirements-build.txt)" # older ones know no new wheels
$pip install --quiet --no-deps -r jetson/requirements-build.txt
