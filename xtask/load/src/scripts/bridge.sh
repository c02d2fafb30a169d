# Reads the unit of a second service from standard input. That service takes over from the first one, so that the first
# one can be replaced. Waits up to $1 seconds until it is ready.
rm -rf "$bridge_unit.d"
cat > "$bridge_unit"
if [ -d "$unit.d" ]; then cp -r "$unit.d" "$bridge_unit.d"; fi
systemctl daemon-reload
: > "$lib/next/started"
if ! systemctl start "$bridge"; then
    show_unit "$bridge"
    fail "the new agent did not take over"
fi
await_ready "$lib/next/xdp-imds" "$(main_of "$bridge")" "$1" ||
    fail "the new agent serves as $bridge, but is not ready after $1 s; see \`xdp-imds status\`"
