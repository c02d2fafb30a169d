# Removes configuration, records, state and logs, unless an agent uses them that no load has started.
for process in /proc/[0-9]*; do
    [ "$(cat "$process/comm" 2>/dev/null)" != xdp-imds ] ||
        fail "process ${process#/proc/} is an agent that \`cargo xtask load\` did not start; stop it first"
done
rm -rf "$(dirname "$config")" "$state" "$logs"
