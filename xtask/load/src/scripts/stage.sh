# Reads the new binary, of $1 bytes, from standard input.
empty_next
cat > "$lib/next/xdp-imds"
[ "$(wc -c < "$lib/next/xdp-imds")" -eq "$1" ] || fail "the copy is not complete; run the command again"
chmod 0755 "$lib/next/xdp-imds"
"$lib/next/xdp-imds" --version
