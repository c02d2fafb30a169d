# Asks the new binary whether this host can serve with the configuration $1. Shows what is not ok, but for the agent that
# runs: the new one takes over from it.
if found=$("$lib/next/xdp-imds" doctor --config "$1" 2>&1); then
    echo "$found" | grep -v -e '^ok ' -e '^warn  agent: an agent ' >&2 || true
else
    echo "$found" | grep -v '^ok ' >&2 || true
    fail "the host cannot serve yet; do what the lines with FAIL say, then run the command again"
fi
