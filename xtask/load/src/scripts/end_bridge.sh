# Waits up to $1 seconds until the bridge, if there is one, has ended, and removes it.
if [ -e "$bridge_unit" ]; then
    await_stopped "$bridge" "$1" || systemctl stop "$bridge"
    rm -rf "$bridge_unit" "$bridge_unit.d"
    systemctl daemon-reload
    systemctl reset-failed "$bridge" 2>/dev/null || true
fi
rm -rf "$lib/next"
