# Puts the new binary in place and keeps the one before it for a rollback.
mkdir -p "$(dirname "$binary")"
if [ -e "$binary" ]; then
    if cmp -s "$binary" "$lib/next/xdp-imds"; then
        echo "the present binary is the same; it does not become $lib/previous" >&2
    else
        cp -p "$binary" "$lib/previous.new"
        mv -f "$lib/previous.new" "$lib/previous"
        echo "the binary before is now $lib/previous" >&2
    fi
fi
# A copy: the running agent's own file stays until the end.
cp -p "$lib/next/xdp-imds" "$binary.new"
mv -f "$binary.new" "$binary"
# From here on the host is loaded, and a load that fails leaves $lib.
rm -f "$lib/next/made"
