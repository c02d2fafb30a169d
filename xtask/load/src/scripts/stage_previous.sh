# Makes the previous binary the next one.
[ -x "$lib/previous" ] || fail "$lib/previous does not exist: there is no binary to go back to"
empty_next
cp -p "$lib/previous" "$lib/next/xdp-imds"
"$lib/next/xdp-imds" --version
