#!/bin/sh
# Installs the files beside this script, or removes them.
#
#   ./install.sh [PREFIX]            into PREFIX, /usr/local if none is named
#   ./install.sh --remove [PREFIX]   what was installed; the state root stays
set -eu

cd "$(dirname "$0")"
remove=no
if [ "${1:-}" = --remove ]; then
    remove=yes
    shift
fi
prefix=${1:-/usr/local}

if [ "$remove" = yes ]; then
    rm -rf "$prefix/lib/exocell" "$prefix/share/doc/exocell"
    rm -f "$prefix/bin/exocell" "$prefix/share/bash-completion/completions/exocell" \
        "$prefix/share/zsh/vendor-completions/_exocell" "$prefix/share/fish/vendor_completions.d/exocell.fish" \
        "$prefix"/share/man/man1/exocell.1.gz "$prefix"/share/man/man1/exocell-*.1.gz \
        "$prefix"/lib/systemd/system/exocell-docker.service "$prefix"/lib/systemd/system/exocell-docker.socket
    echo "exocell is removed from $prefix; images and cells stay in the state root"
    exit 0
fi

sha256sum --quiet --check MANIFEST.sha256
mkdir -p "$prefix"
# An older kernel is nobody's any more.
rm -rf "$prefix/lib/exocell"
cp -R --no-preserve=ownership usr/. "$prefix/"
sed -i "s,/usr/bin/exocell,$prefix/bin/exocell," "$prefix/lib/systemd/system/exocell-docker.service"
"$prefix/bin/exocell" version
case :$PATH: in
    *":$prefix/bin:"*) ;;
    *) echo "add $prefix/bin to PATH" ;;
esac
