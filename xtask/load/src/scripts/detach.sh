# Starts the new agent as a process of its own and waits up to $1 seconds until it is ready.
new=$lib/next/xdp-imds
: > "$lib/next/started"
detach "$new"
if await_ready "$new" "$pid" "$1"; then
    echo "$pid" > "$pidfile"
    exit 0
fi
echo "the last lines of $log:" >&2
tail -n 20 "$log" >&2
if answers "$new" "$pid"; then
    # It has the ports already. Without it nobody would serve.
    echo "$pid" > "$pidfile"
    : > "$lib/next/serves"
    fail "the new agent serves, but is not ready after $1 s; see \`xdp-imds status\`"
fi
if is_alive "$pid"; then kill "$pid"; fi
fail "the new agent did not take over"
