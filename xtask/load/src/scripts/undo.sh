# After a failure before the end of a takeover: removes what was staged, and sees to it that the agent from before
# serves. $1 is its process, or empty. $2 is how long an agent may take to end, $3 to become ready, in seconds.
if [ -e "$lib/next/serves" ] || { has_systemd && [ "$(state_of "$bridge")" = active ]; }; then
    echo "the new agent has the ports and goes on serving; \`cargo xtask load\` completes the change" >&2
    exit 0
fi
if has_systemd && [ -e "$bridge_unit" ]; then
    systemctl stop "$bridge" || true
    rm -rf "$bridge_unit" "$bridge_unit.d"
    systemctl daemon-reload
fi
# Removes the copies. Without $lib `unload` would not know a host that an earlier load has loaded.
remove_next() {
    made=no
    if [ -e "$lib/next/made" ]; then made=yes; fi
    rm -rf "$lib/next"
    if [ "$made" = yes ]; then rmdir "$lib" 2>/dev/null || true; fi
}
started=no
if [ -e "$lib/next/started" ]; then started=yes; fi
if [ -e "$lib/next/replaced" ]; then
    mv "$config.previous" "$config"
    if [ -e "$lib/next/config.previous" ]; then mv "$lib/next/config.previous" "$config.previous"; fi
fi
if [ -e "$lib/next/created" ]; then rm -f "$config"; fi
# Directories that this load has made go if they are empty: somebody may have filled them meanwhile.
if [ -e "$lib/next/records" ]; then rmdir "$records" 2>/dev/null || true; fi
if [ -e "$lib/next/directory" ]; then rmdir "$(dirname "$config")" 2>/dev/null || true; fi
if [ "$started" = yes ] && [ -z "$1" ]; then
    # The new agent may have closed taps before it ended, and `unload` needs a binary to open them.
    if [ -e "$binary" ]; then remove_next; fi
    echo "no agent ran before, and the new one does not serve; see $log" >&2
    exit 0
fi
remove_next
# Without a start nothing was asked of the running agent, even if it does not answer here.
if [ "$started" = no ] || answers "$binary" "$1"; then
    serves=
    if [ -n "$1" ] && is_alive "$1"; then serves="; the agent that ran before still serves"; fi
    echo "nothing was changed$serves" >&2
    exit 0
fi
# The new agent died after the previous one had given up its ports. They are closed until an agent starts.
echo "the previous agent has given up its ports; it is started again" >&2
if has_systemd; then
    systemctl restart "$service" || fail "$service does not start; see \`journalctl -u $service\`"
    await_ready "$binary" "$(main_of "$service")" "$3" || fail "$service is not ready; see \`journalctl -u $service\`"
else
    if is_alive "$1"; then kill "$1"; fi
    await_ended "$1" "$2" || fail "process $1 still runs"
    detach "$binary"
    echo "$pid" > "$pidfile"
    await_ready "$binary" "$pid" "$3" || fail "the previous agent is not ready; see $log"
fi
echo "the previous agent serves again" >&2
