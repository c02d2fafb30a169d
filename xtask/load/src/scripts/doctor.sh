# Asks the new binary whether this host can serve with the configuration $1. $2 is the process of the agent that runs,
# or empty. Shows what is not ok, but for that agent, from which the new one takes over. If none runs, an earlier one
# may have left taps closed: the remedy is to start an agent, which the load does.
closed='^FAIL  agent\.closed: '
passes=$closed
note='an agent that has ended left taps closed (agent.closed); the new one takes them'
if [ -n "$2" ]; then
    # With an agent that runs the line says something else: the new agent would not find it.
    closed='^no line$'
    # What somebody detached or unpinned is a fault of the agent that runs, not of the host.
    passes='^FAIL  agent\.attachments: '
    note='the load goes on in spite of agent.attachments; the new agent restores what it can'
fi
code=0
found=$("$lib/next/xdp-imds" doctor --config "$1" 2>&1) || code=$?
failed=$(echo "$found" | grep '^FAIL ') || true
if [ "$code" -eq 0 ]; then
    echo "$found" | grep -v -e '^ok ' -e '^warn  agent: an agent ' >&2 || true
elif [ "$code" -eq 1 ] && [ -n "$failed" ] && ! echo "$failed" | grep -q -v "$passes"; then
    echo "$found" | grep -v -e '^ok ' -e '^warn  agent: an agent ' -e "$closed" >&2 || true
    echo "$note" >&2
else
    echo "$found" | grep -v -e '^ok ' -e "$closed" >&2 || true
    fail "the host cannot serve yet; do what the lines with FAIL say, then run the command again"
fi
