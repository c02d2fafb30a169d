# Puts the new binary in place and keeps the one before it for a rollback.
mkdir -p "$(dirname "$binary")"
if [ -e "$binary" ] && ! cmp -s "$binary" "$lib/next/xdp-imds"; then
    cp -p "$binary" "$lib/previous.new"
    mv -f "$lib/previous.new" "$lib/previous"
fi
# A copy: the running agent's own file stays until the end.
cp -p "$lib/next/xdp-imds" "$binary.new"
mv -f "$binary.new" "$binary"
