#!/usr/bin/env bash
# Fetches what tests/support/hadoop.py runs into .venv/hadoop, on Debian: the servers of HDFS are in
# the package of an old Spark (220 MB), and need Jersey 1.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=.venv/hadoop
fetched=$(mktemp -d)
trap 'rm -rf "$fetched"' EXIT
.venv/bin/python -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
  --dest "$fetched" pyspark==2.4.8
mkdir "$fetched/jars"
tar xzf "$fetched/pyspark-2.4.8.tar.gz" -C "$fetched/jars" --strip-components 3 --wildcards \
  '*/jars/*.jar'
apt-get update -qq || true
(cd "$fetched" && apt-get download -qq libjersey1-{core,server,servlet}-java libjsr311-api-java)
for package in "$fetched"/*.deb; do
  dpkg -x "$package" "$fetched"
done
cp "$fetched"/usr/share/java/{jersey1-*-1,jsr311-api-}*.jar "$fetched/jars"
rm -rf "$here"
mv "$fetched/jars" "$here"
