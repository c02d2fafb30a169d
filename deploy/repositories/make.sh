#!/bin/sh
# Makes a repository for APT and one for DNF of all packages in a directory, and signs both.
#
#   make.sh PACKAGES OUT [KEY]
#
# PACKAGES has .deb and .rpm files, perhaps of several releases. OUT becomes `apt` and `rpm`, to be copied to a web
# server as they are. KEY is a key of gpg, by whose fingerprint or address it signs; without it, the repositories are
# for a look only. Sign the .rpm files first (`rpmsign --addsign`): their digests are in the repository. If anything
# fails, OUT keeps what it had.
# Needs apt-utils, createrepo-c and gnupg.
set -eu
[ $# -ge 2 ] && [ $# -le 3 ] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
packages=$(cd "$1" && pwd)
key=${3:-}
for kind in deb rpm; do
  # Without a match the pattern itself is the only word.
  for file in "$packages"/*."$kind"; do
    [ -e "$file" ] && continue
    echo "$0: expected .$kind files in $1, found none; add them, or name another directory" >&2
    exit 1
  done
done
out=$(mkdir -p "$2" && cd "$2" && pwd)
made=$(mktemp -d "$out/.new.XXXXXX")
trap 'rm -rf "$made"' EXIT
trap 'exit 130' HUP INT TERM
cd "$made"
mkdir -p apt/pool rpm

sign() { # what to do, the file to write, the file to sign
  [ -z "$key" ] || gpg --batch --yes --quiet --local-user "$key" --armor "$1" --output "$2" "$3"
}

cp "$packages"/*.deb apt/pool
for architecture in amd64 arm64; do
  index=apt/dists/stable/main/binary-$architecture
  mkdir -p "$index"
  (cd apt && apt-ftparchive --arch "$architecture" packages pool) >"$index/Packages"
  gzip -9nk "$index/Packages"
done
# The file itself must not be listed in it.
apt-ftparchive -o APT::FTPArchive::Release::Origin=xdp-imds -o APT::FTPArchive::Release::Label=xdp-imds \
  -o APT::FTPArchive::Release::Suite=stable -o APT::FTPArchive::Release::Codename=stable \
  -o 'APT::FTPArchive::Release::Architectures=amd64 arm64' -o APT::FTPArchive::Release::Components=main \
  release apt/dists/stable >Release
mv Release apt/dists/stable/Release
sign --clearsign apt/dists/stable/InRelease apt/dists/stable/Release
sign --detach-sign apt/dists/stable/Release.gpg apt/dists/stable/Release
cp "$here/xdp-imds.sources" apt

cp "$packages"/*.rpm rpm
createrepo_c --quiet rpm
sign --detach-sign rpm/repodata/repomd.xml.asc rpm/repodata/repomd.xml
cp "$here/xdp-imds.repo" rpm

[ -z "$key" ] || for place in apt rpm; do gpg --batch --armor --export "$key" >"$place/xdp-imds.asc"; done

rm -rf "$out/apt" "$out/rpm"
mv apt rpm "$out"
