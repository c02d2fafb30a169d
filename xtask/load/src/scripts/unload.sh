# Stops the agent within $1 seconds, opens the taps, and removes what a load has put here.
if has_systemd; then
    for one in "$bridge" "$service"; do
        systemctl disable --quiet --now "$one" 2>/dev/null || true
    done
fi
if pid=$(recorded); then
    kill "$pid"
    await_ended "$pid" "$1" || fail "the agent, process $pid, still runs $1 s after SIGTERM"
fi
# A load whose agent ended before it was ready leaves only the second one.
for agent in "$binary" "$lib/next/xdp-imds"; do
    if [ -x "$agent" ]; then
        if [ -e "$config" ]; then "$agent" release --config "$config" >&2; else "$agent" release >&2; fi
        break
    fi
done
if [ -e "$unit" ] && grep -q "$mark" "$unit"; then rm -f "$unit"; fi
if has_systemd; then
    rm -rf "$bridge_unit" "$bridge_unit.d"
    systemctl daemon-reload
    systemctl reset-failed "$bridge" "$service" 2>/dev/null || true
fi
rm -f "$binary" "$pidfile" "$log"
rm -rf "$lib" "$run"
