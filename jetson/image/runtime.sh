#!/bin/sh
# The image that runs: Python, where the base has none, the user, and the places of bundle and engines.
set -eu
if ! command -v python3 >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3
  apt-get clean
  rm -rf /var/lib/apt/lists/*
fi
# The file mode does not outlive an installation by pip, from which a package can be made.
chmod 755 /usr/local/bin/edgepool-entrypoint
# The devices of a Jetson belong to these groups.
groupadd --force --system video
groupadd --force --system render
useradd --uid 10001 --create-home --groups video,render edgepool
install -d /models
install -d --owner edgepool --group edgepool --mode 700 /cache
/opt/edgepool/bin/edgepool --version
