#!/usr/bin/env bash
# Makes the base image's root directory from Debian packages.
#
#   images/base/build.sh [OUT_DIR]
#
# The tree is cached under ${EXOCELL_CACHE:-~/.cache/exocell}/base/<key>, where the
# key covers this script, the package list, the mirror and the suite. OUT_DIR, if
# given, becomes a symbolic link to it. The last line printed is the tree's path.
# Needs root, debootstrap, and a Debian mirror in the machine's own apt sources.
set -euo pipefail
umask 022

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${EXOCELL_CACHE:-$HOME/.cache/exocell}/base
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
known_suites='bookworm trixie forky sid stable testing unstable'

die() { echo "base image: $*" >&2; exit 1; }

# Prints "URI SUITE" of the first Debian source with component main that apt has.
debian_mirror() {
    apt-get indextargets --no-release-info --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        while read -r uri suite component; do
            [[ $component == main && $uri =~ ^https?:// ]] || continue
            [[ " $known_suites " == *" $suite "* ]] || continue
            echo "$uri $suite"
            return
        done
}

# What no program in a cell reads: documents, caches, package lists, device nodes.
trim() {
    local root=$1
    rm -rf "$root"/usr/share/{doc,man,info,lintian,bug,doc-base}/* \
        "$root"/var/lib/apt/lists/* "$root"/var/cache/{apt/archives,debconf,ldconfig,man}/* \
        "$root"/var/cache/apt/*.bin "$root"/var/log/* "$root"/tmp/* "$root"/run/* \
        "${root:?}"/dev/* "$root"/debootstrap
    find "$root/usr/share/locale" -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
    find "$root/usr" -name __pycache__ -type d -prune -exec rm -rf {} +
}

# Replaces what debootstrap copied from this machine.
make_neutral() {
    local root=$1
    echo cell > "$root/etc/hostname"
    printf '127.0.0.1\tlocalhost cell\n::1\tlocalhost\n' > "$root/etc/hosts"
    : > "$root/etc/resolv.conf"
    : > "$root/etc/machine-id"
}

unmount_below() {
    awk -v top="$1/" 'index($5, top) == 1 { print $5 }' /proc/self/mountinfo | sort -r |
        while read -r mount_point; do umount "$mount_point"; done
}

build() {
    local mirror=$1 suite=$2 packages=$3 tree=$4 work
    work=$(mktemp -d "$cache/.building.XXXXXX")
    # shellcheck disable=SC2064 # `work` is gone when the trap runs
    trap "unmount_below '$work'; rm -rf --one-file-system '$work'" EXIT
    echo "base image: installing $suite from $mirror (log: $cache/build.log)" >&2
    if ! debootstrap --variant=minbase --keyring="$keyring" --include="${packages// /,}" \
        "$suite" "$work/root" "$mirror" > "$cache/build.log" 2>&1; then
        tail -n 20 "$cache/build.log" "$work/root/debootstrap/debootstrap.log" >&2 || true
        die "debootstrap failed, see the lines above"
    fi
    unmount_below "$work"
    trim "$work/root"
    make_neutral "$work/root"
    mv -T "$work/root" "$tree"
    rm -rf "$work"
    trap - EXIT
}

[[ $(id -u) == 0 ]] || die "debootstrap needs root"
command -v debootstrap > /dev/null || die "debootstrap is missing: apt-get install debootstrap"
mkdir -p "$cache"
exec 9> "$cache/lock"
flock 9 # a second builder waits, then finds the tree in the cache
for left in "$cache"/.building.*; do # by a builder that was killed, perhaps with /proc mounted
    unmount_below "$left"
    rm -rf --one-file-system "$left"
done

read -r mirror suite <<< "$(debian_mirror)" || true
[[ -n ${suite:-} ]] || die "no Debian mirror with component main in this machine's apt sources"
packages=$(grep -v '^#' "$here/packages" | xargs)
key=$({ cat "$here/build.sh"; echo "$mirror $suite $packages"; } | sha256sum | cut -c1-16)
tree=$cache/$key
[[ -d $tree ]] || build "$mirror" "$suite" "$packages" "$tree"

if [[ $# -gt 0 ]]; then
    ln -sfnT "$tree" "$1"
fi
echo "$tree"
