# Makes the binary before the present one the next one.
source=$(earlier)
[ -n "$source" ] || fail "$lib/previous does not exist: there is no binary to go back to"
empty_next
cp -p "$source" "$lib/next/xdp-imds"
"$lib/next/xdp-imds" --version
