# Reads the new binary, of $1 octets, from standard input.
mkdir -p "$lib/next"
rm -f "$lib/next/xdp-imds"
cat > "$lib/next/xdp-imds"
[ "$(wc -c < "$lib/next/xdp-imds")" -eq "$1" ] || fail "the copy is not complete; run the command again"
chmod 0755 "$lib/next/xdp-imds"
"$lib/next/xdp-imds" --version
